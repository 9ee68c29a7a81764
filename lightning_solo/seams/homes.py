"""The two packages in which Lightning is published, and classes for either of them.

`lightning.pytorch` and `pytorch_lightning` contain the same code twice. Each Trainer refuses the other package's
strategies. A callback works in both, because its hooks are called by name.
"""

from __future__ import annotations

import copyreg
import importlib
import logging
import sys
import warnings
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar

from lightning_solo.attributes import replaced

FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Home of the Trainer -> its Fabric package."""


def default_home() -> str:
    """Return the home that the program imported; ``lightning.pytorch`` if both or neither."""
    other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return "pytorch_lightning" if other else "lightning.pytorch"


def home_of(thing: object) -> str:
    """Return the home of a Trainer, module, strategy or callback, by its base classes."""
    for cls in type(thing).__mro__:
        for home in FABRIC:
            if f"{cls.__module__}.".startswith(f"{home}."):
                return home
    return default_home()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's messages about a Trainer that the user didn't create."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*FABRIC, *FABRIC.values()):
            for logger in (name, f"{name}.utilities.rank_zero"):
                stack.enter_context(replaced(logging.getLogger(logger), "disabled", True))
        yield


def part(home: str, path: str) -> Any:
    """Return a module of a home, such as ``part("pytorch_lightning", "utilities.model_helpers")``."""
    return importlib.import_module(f"{home}.{path}")


def fabric_part(home: str, path: str) -> Any:
    """Return a module of the Fabric package that belongs to a home, such as ``fabric_part(home, "plugins")``."""
    return importlib.import_module(f"{FABRIC[home]}.{path}")


class OfEitherHome:
    """The base class of strategies that extend Lightning's strategy ``base``.

    Its subclasses make instances for the home that the program imported. `for_home` returns the class for a home.
    """

    base: ClassVar[str]
    """Name of the base class in ``<home>.strategies``."""
    home: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls if hasattr(cls, "home") else for_home(cls))


def for_home(cls: Any, home: str | None = None) -> type:
    """Return ``cls`` as a subclass of ``<home>.strategies.<base>``.

    Args:
        cls: a class derived from `OfEitherHome`. Any other class is returned unchanged.
        home: ``"lightning.pytorch"`` or ``"pytorch_lightning"``; by default the one that the program imported.
    """
    return _over_base(cls, home or default_home()) if issubclass(cls, OfEitherHome) else cls


class _OverBase(ABCMeta):
    """Metaclass of the classes that `for_home` makes. They can't be pickled by name, since no module contains them."""


def _reduced(cls: Any) -> Any:
    """Pickle a class made by `for_home` by its template and home, and a user's subclass by its name."""
    return (for_home, (cls.template, cls.home)) if "template" in vars(cls) else cls.__qualname__


copyreg.pickle(_OverBase, _reduced)


@cache
def _over_base(cls: Any, home: str) -> type:
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "home": home,
        "template": cls,
    }
    return _OverBase(cls.__name__, (cls, getattr(part(home, "strategies"), cls.base)), body)
