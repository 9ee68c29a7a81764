"""The classes of all callbacks, for short `_target_` paths; the facade makes this module callable, too."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_solo.presets.registry import NAMES

_MODULES = {target.partition(":")[2]: target.partition(":")[0] for target in NAMES["callback"].values()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
