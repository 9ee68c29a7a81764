"""Optimizer states, master weights and steps in backward, on plain torch, without Lightning.

Importing this package does not import torch; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_solo.optim.compact_adamw import CompactAdamW
    from lightning_solo.optim.gradient_release import StepInBackward
    from lightning_solo.optim.master_weights import MasterWeights

__all__ = ["CompactAdamW", "MasterWeights", "StepInBackward"]

_MODULES = {
    "CompactAdamW": "compact_adamw",
    "StepInBackward": "gradient_release",
    "MasterWeights": "master_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
