"""Where a user's task function is defined, and its import in another process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_solo.errors import ConflictError


@dataclass(frozen=True)
class Application:
    """Where a task function is defined.

    Attributes:
        module: the name to import it by.
        file: its script, where it was run as one: `python train.py`.
        function: its name in the module.
        unwrap: how many decorators, such as `hydra.main`, wrap it there.
        path: `sys.path` of the command.
        arguments: `sys.argv` of the command.
        preload: modules to import before the first job; by default ``PRELOAD`` of its module.
        resolvers: names of OmegaConf's resolvers in the command; importing the module has to register them too.
    """

    module: str
    file: str | None
    function: str
    unwrap: int
    path: tuple[str, ...]
    arguments: tuple[str, ...]
    preload: tuple[str, ...] = ()
    resolvers: tuple[str, ...] = ()


def application_of(task: Callable[..., Any], preload: tuple[str, ...] = ()) -> Application:
    """Return where a task function is defined.

    Raises:
        ConflictError: another process could not find it.
    """
    name, file = task.__module__, None
    if name == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:  # python -m
            name, file = spec.name, None
        elif file is not None and Path(file).is_file():
            name, file = Path(file).stem, str(Path(file).absolute())
        else:
            raise ConflictError(
                f"hydra/launcher=solo: {_name(task)} lives in an interactive session, where a job's own process can't"
                " find it; write it to a file"
            )
    function = _name(task)
    wrapped: Any = sys.modules[task.__module__]
    for part in function.split("."):
        wrapped = getattr(wrapped, part, None)
    unwrap = 0
    while wrapped is not None and wrapped is not task:
        wrapped, unwrap = getattr(wrapped, "__wrapped__", None), unwrap + 1
    if wrapped is None:
        raise ConflictError(
            f"hydra/launcher=solo: no {function} in {file or name}, where a job's own process would look for it; define"
            " the task function at the top level of its module"
        )
    preload = preload or getattr(sys.modules[task.__module__], "PRELOAD", ())
    return Application(name, file, function, unwrap, tuple(sys.path), tuple(sys.argv), tuple(preload), _resolvers())


def _resolvers() -> tuple[str, ...]:
    from omegaconf.basecontainer import BaseContainer

    return tuple(sorted(name for name in BaseContainer._resolvers if not name.startswith("hydra")))


def _name(task: Callable[..., Any]) -> str:
    return getattr(task, "__qualname__", type(task).__qualname__)


def load(application: Application) -> Callable[..., Any]:
    """Import an application in this process, and return its task function.

    Raises:
        ConflictError: importing the module does not register a resolver that the command has.
    """
    sys.path[:] = application.path
    sys.argv[:] = application.arguments
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals

    for name in application.preload:
        importlib.import_module(name)
    target: Any = _import(application)
    setup_globals()
    Plugins.instance()  # which may register some
    if missing := sorted(set(application.resolvers) - set(_resolvers())):
        raise ConflictError(
            f"{', '.join(missing)}: resolvers that {application.file or application.module} doesn't register when it is"
            " imported, as a job's own process does; register them at its top level, not below `if __name__ =="
            ' "__main__"`'
        )
    sys.modules["__main__"] = target  # its name in what the command has pickled
    for part in application.function.split("."):
        target = getattr(target, part)
    for _ in range(application.unwrap):
        target = target.__wrapped__
    task: Callable[..., Any] = target
    return task


def _import(application: Application) -> ModuleType:
    if application.file is None:
        return importlib.import_module(application.module)
    loader = SourceFileLoader(application.module, application.file)  # also of a file without .py
    spec = importlib.util.spec_from_file_location(application.module, application.file, loader=loader)
    assert spec is not None  # a Python file, since it was run
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[application.module] = module
    spec.loader.exec_module(module)
    return module
