"""lightning-solo: the largest model, at the best speed, on the one GPU you have.

```python
import lightning as L
import lightning_solo as solo

trainer = L.Trainer(**solo.trainer_kwargs("checkpointing"), max_steps=1000)
trainer.fit(module, datamodule)
```

Importing this package imports neither torch nor Lightning; each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lightning_solo.callbacks as _room

if TYPE_CHECKING:
    from lightning_solo.attach import list_presets, show, trainer_kwargs
    from lightning_solo.errors import (
        BudgetError,
        CapabilityError,
        CheckpointError,
        ConflictError,
        NothingToDoError,
        PlanError,
        PresetError,
        SoloError,
    )
    from lightning_solo.planner.plan import Plan
    from lightning_solo.planner.preset_plans import plan
    from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
    from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
    from lightning_solo.techniques.leak_finder.technique import LeakFinder
    from lightning_solo.techniques.memory_logger.technique import MemoryLogger
    from lightning_solo.techniques.memory_snapshot.technique import MemorySnapshot
    from lightning_solo.techniques.throughput.technique import Throughput
    from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy

__version__ = "0.1.0"

__all__ = [
    "AccumulationSchedule",
    "ActivationCheckpointing",
    "BudgetError",
    "CapabilityError",
    "CheckpointError",
    "ConflictError",
    "LeakFinder",
    "MemoryLogger",
    "MemorySnapshot",
    "NothingToDoError",
    "Plan",
    "PlanError",
    "PresetError",
    "SoloError",
    "Throughput",
    "ZeroOffloadStrategy",
    "callbacks",
    "list_presets",
    "plan",
    "show",
    "trainer_kwargs",
]

_HOME = {
    "trainer_kwargs": "lightning_solo.attach",
    "list_presets": "lightning_solo.attach",
    "show": "lightning_solo.attach",
    "Plan": "lightning_solo.planner.plan",
    "plan": "lightning_solo.planner.preset_plans",
    "AccumulationSchedule": "lightning_solo.callbacks",
    "ActivationCheckpointing": "lightning_solo.callbacks",
    "LeakFinder": "lightning_solo.callbacks",
    "MemoryLogger": "lightning_solo.callbacks",
    "MemorySnapshot": "lightning_solo.callbacks",
    "Throughput": "lightning_solo.callbacks",
    "ZeroOffloadStrategy": "lightning_solo.techniques.zero_offload.technique",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "lightning_solo.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Callbacks(ModuleType):
    """`lightning_solo.callbacks` is a room and a function: the word is right for both, so the module can be called."""

    def __call__(
        self, preset: str | Mapping[str, Any], overrides: Sequence[str] = (), *, allow: Sequence[str] = ()
    ) -> list[Any]:
        """See `lightning_solo.attach.callbacks`."""
        from lightning_solo import attach

        return attach.callbacks(preset, overrides, allow=allow)


_room.__class__ = _Callbacks
