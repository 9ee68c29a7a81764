"""A task function for other processes, which import it by name, or unpickle it by value if it can't be imported."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobStatus, run_job, setup_globals
from omegaconf.basecontainer import BaseContainer

from lightning_solo.errors import ConflictError


@dataclass(frozen=True)
class Application:
    """A task function and the state it needs in another process."""

    module: str  # name of the module to import
    file: str | None  # its script, if it was run as one: `python train.py`
    function: str  # its name in the module
    unwrap: int | None  # number of decorators around it there, such as `hydra.main`; None if it can't be imported
    path: tuple[str, ...]  # `sys.path` of the command
    arguments: tuple[str, ...]  # `sys.argv` of the command
    preload: tuple[str, ...] = ()  # modules to import before the first job; by default ``PRELOAD`` of its module
    # the command's OmegaConf resolvers, pickled; None for one that can't be pickled
    resolvers: Mapping[str, bytes | None] = field(default_factory=dict)
    # the pickled function (None if it can be imported) and Hydra's pickled state
    carried: bytes = pickle.dumps((None, None))
    code: Mapping[str, str] = field(default_factory=dict)  # a hash of each file that defines it, see `_code_of`

    @property
    def name(self) -> str:
        """The name of the script or module, or else of the function."""
        name = self.function if self.file is None and self.module == "__main__" else self.module
        return name.rpartition(".")[2].strip("<>")

    def dumps(self, value: object) -> bytes:
        """Return an object as bytes for a process that has loaded this application.

        Raises:
            ConflictError: some of it can't be pickled.
        """
        return _dumps(value, by_value=self.unwrap is None)


def application_of(task: Callable[..., Any], preload: Sequence[str] = (), hydra_context: Any = None) -> Application:
    """Return a function or callable object for other processes; without ``hydra_context`` a job is a plain call.

    Raises:
        ConflictError: it can neither be imported nor pickled.
    """
    name, file = task.__module__, None
    importable = True
    if name == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        importable = file is not None and _is_guarded(Path(file))
        if spec is not None:  # python -m
            name, file = spec.name, None
        elif file is not None:
            name, file = Path(file).stem, str(Path(file).absolute())
    function = str(getattr(task, "__qualname__", type(task).__qualname__))
    unwrap = _decorators(task, function) if importable else None
    state = None
    if hydra_context is not None:
        singletons = Singleton.get_state()["instances"]
        if unwrap is not None:  # its import fills the ConfigStore
            singletons = {kind: instance for kind, instance in singletons.items() if kind is not ConfigStore}
        state = hydra_context, singletons
    carried = _dumps((task if unwrap is None else None, state), by_value=unwrap is None)
    module = sys.modules.get(task.__module__)
    return Application(
        module=name,
        file=file,
        function=function,
        unwrap=unwrap,
        path=tuple(sys.path),
        arguments=tuple(sys.argv),
        preload=tuple(preload or getattr(module, "PRELOAD", ())),
        resolvers=_pickled_resolvers(),
        carried=carried,
        code=_code_of(module),
    )


def _code_of(module: ModuleType | None) -> dict[str, str]:
    """Return file -> hash of each imported file of the application: ``module`` and files in the first of `sys.path`.

    Python and `lightning-solo` put the application's folder first.
    """
    folder = Path(*sys.path[:1]).absolute()
    # read __dict__ directly: attribute access would import lazy modules
    modules = [object.__getattribute__(m, "__dict__") for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    imported = {Path(file) for names in modules if isinstance(file := names.get("__file__"), str)}
    files = {file for file in imported if file.is_relative_to(folder) and "site-packages" not in file.parts}
    hashes = {}
    for file in sorted(files | {Path(getattr(module, "__file__", None) or "")}):
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            hashes[str(file.relative_to(folder) if file.is_relative_to(folder) else file.name)] = digest
    return hashes


def _is_guarded(script: Path) -> bool:
    """Return whether a script tests `__name__` at its top level, so that importing it doesn't run it."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # not Python source, such as an archive
        return False
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test))


def _decorators(task: Callable[..., Any], function: str) -> int | None:
    """Return the number of decorators around a module's function, or None if the module lacks it."""
    member: Any = sys.modules.get(task.__module__)
    for part in function.split("."):
        member = getattr(member, part, None)
    count = 0
    while member is not None and member is not task:
        member, count = getattr(member, "__wrapped__", None), count + 1
    return None if member is None else count


def _dumps(value: object, *, by_value: bool) -> bytes:
    """Return a pickled object; ``by_value`` pickles code of the command that the other process can't import."""
    if not by_value:
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            return pickle.dumps(value)
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:  # a user's object may raise anything
        raise ConflictError(
            f"hydra/launcher=solo: the task function, the configuration or one of hydra.callbacks can't be pickled for"
            f" another process: {error}; define it at the top level of a module that can be imported, or create the"
            " object that can't be pickled inside the task function"
        ) from None
    return dumped


def _pickled_resolvers() -> dict[str, bytes | None]:
    pickled: dict[str, bytes | None] = {}
    for name, resolver in sorted(BaseContainer._resolvers.items()):
        if not name.startswith(("hydra", "oc.")):
            pickled[name] = None
            with suppress(ConflictError):
                pickled[name] = _dumps(resolver, by_value=True)
    return pickled


def load(application: Application) -> Callable[[Any], Any]:
    """Load the task function in this process and return it; its argument is a configuration, or that of a plain call.

    Raises:
        ConflictError: a resolver of the command can neither be registered by an import nor be pickled.
    """
    sys.path[:] = application.path
    sys.argv[:] = application.arguments
    for name in application.preload:
        importlib.import_module(name)
    module = None if application.unwrap is None else _import(application)
    setup_globals()
    Plugins.instance()  # which may register resolvers
    _register(application)
    if module is not None:
        sys.modules["__main__"] = module  # pickled objects of the command refer to it
    task, state = pickle.loads(application.carried)
    if module is None:  # classes that the function uses are pickled under their own names
        vars(sys.modules["__main__"]).update(getattr(task, "__globals__", {}))
    else:
        task = attrgetter(application.function)(module)
        for _ in range(application.unwrap or 0):
            task = task.__wrapped__
    return task if state is None else partial(under_hydra, task, *state)


def _register(application: Application) -> None:
    """Register those of the command's resolvers that importing the application didn't register."""
    for name, pickled in application.resolvers.items():
        if name in BaseContainer._resolvers:
            continue
        if pickled is None:
            raise ConflictError(
                f"{name}: a resolver that can't be pickled for another process, and that"
                f" {application.file or application.module} doesn't register when it is imported there; register it at"
                ' the top level of the file, not below `if __name__ == "__main__"`'
            )
        BaseContainer._resolvers[name] = pickle.loads(pickled)


def _import(application: Application) -> ModuleType:
    if application.file is None:
        return importlib.import_module(application.module)
    loader = SourceFileLoader(application.module, application.file)  # also for a file without .py
    spec = importlib.util.spec_from_file_location(application.module, application.file, loader=loader)
    assert spec is not None  # a Python file, since it was run
    module = sys.modules[application.module] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def under_hydra(task: Callable[[Any], Any], hydra_context: Any, instances: dict[Any, Any], config: Any) -> Any:
    """Call the task function under Hydra's `run_job` and return its result; its exceptions pass through."""
    setup_globals()
    here = {ConfigStore: ConfigStore.instance(), Plugins: Plugins.instance()}
    Singleton.set_state({**Singleton.get_state(), "instances": {**here, **instances}})
    HydraConfig.instance().set_config(config)
    job_return = run_job(
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=hydra_context,
    )
    if job_return.status != JobStatus.COMPLETED:
        raise job_return._return_value
    return job_return.return_value
