"""The two packages in which Lightning is published, and classes made for either.

`lightning.pytorch` and `pytorch_lightning` hold the same code twice: a strategy of one is refused by the other's
Trainer. A callback works in both, since its hooks are called by name.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from abc import ABCMeta
from functools import cache
from typing import Any

FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Home of the Trainer -> the Fabric that it stands on."""


def default_home() -> str:
    """Return the home that the program has imported; ``lightning.pytorch`` where it is both or neither."""
    other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return "pytorch_lightning" if other else "lightning.pytorch"


def home_of(thing: object) -> str:
    """Return the home of a Trainer, a module, a strategy or a callback, whatever the user derived it from."""
    for cls in type(thing).__mro__:
        for home in FABRIC:
            if f"{cls.__module__}.".startswith(f"{home}."):
                return home
    return default_home()


def part(home: str, path: str) -> Any:
    """Return a module of a home, such as ``part("pytorch_lightning", "utilities.model_helpers")``."""
    return importlib.import_module(f"{home}.{path}")


def fabric_part(home: str, path: str) -> Any:
    """Return a module of the Fabric that a home stands on."""
    return importlib.import_module(f"{FABRIC[home]}.{path}")


def for_home(cls: type, home: str | None = None) -> type:
    """Return a strategy class over the strategy of a home that its ``base`` names.

    Args:
        cls: a class with `Seams`; its ``base`` is a name in ``<home>.strategies``. One without is returned as it is.
        home: ``"lightning.pytorch"`` or ``"pytorch_lightning"``; by default the one that the program has imported.
    """
    return cls if getattr(cls, "base", None) is None else _over_base(cls, home or default_home())


class _OverBase(ABCMeta):
    """The type of the classes that `for_home` makes, which are attributes of no module."""


def _reduced(cls: Any) -> Any:
    """Pickle such a class by template and home, and what a user derived from it by its name."""
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
