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

import difflib
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lightning_solo.callbacks as _room
from lightning_solo import errors as _errors
from lightning_solo.errors import BudgetError as BudgetError
from lightning_solo.errors import CapabilityError as CapabilityError
from lightning_solo.errors import CheckpointError as CheckpointError
from lightning_solo.errors import ConflictError as ConflictError
from lightning_solo.errors import GradientError as GradientError
from lightning_solo.errors import NothingToDoError as NothingToDoError
from lightning_solo.errors import PlanError as PlanError
from lightning_solo.errors import PresetError as PresetError
from lightning_solo.errors import RefusedStepError as RefusedStepError
from lightning_solo.errors import SoloError as SoloError

if TYPE_CHECKING:
    from lightning_solo.attach import list_presets as list_presets
    from lightning_solo.attach import show as show
    from lightning_solo.attach import trainer_kwargs as trainer_kwargs
    from lightning_solo.checkpoint.manifest import latest_checkpoint as latest_checkpoint
    from lightning_solo.export.adapter_files import load_adapters as load_adapters
    from lightning_solo.export.adapter_files import merge_adapters as merge_adapters
    from lightning_solo.export.factorized import export_factorized as export_factorized
    from lightning_solo.export.graphs import export_graph as export_graph
    from lightning_solo.export.members import load_members as load_members
    from lightning_solo.export.pretrained import export_pretrained as export_pretrained
    from lightning_solo.export.pruned import export_pruned as export_pruned
    from lightning_solo.export.pruned_structure import load_pruned as load_pruned
    from lightning_solo.export.quantized import export_quantized as export_quantized
    from lightning_solo.export.soft_labels import write_soft_labels as write_soft_labels
    from lightning_solo.export.weights import export_weights as export_weights
    from lightning_solo.lightning_cli import SoloCLI as SoloCLI
    from lightning_solo.nn.adaptation import use_adapter as use_adapter
    from lightning_solo.nn.adapter_merging import remove_adapters as remove_adapters
    from lightning_solo.nn.factorizing import merge_factors as merge_factors
    from lightning_solo.nn.quantized_loading import load_quantized as load_quantized
    from lightning_solo.planner.plan import Plan as Plan
    from lightning_solo.planner.preset_plans import plan as plan
    from lightning_solo.prediction.streaming import write_predictions as write_predictions
    from lightning_solo.trainers import trainer as trainer

__version__ = "0.2.0"

_HOME = {
    **dict.fromkeys(("trainer_kwargs", "list_presets", "show"), "lightning_solo.attach"),
    "trainer": "lightning_solo.trainers",
    **dict.fromkeys(("load_adapters", "merge_adapters"), "lightning_solo.export.adapter_files"),
    "remove_adapters": "lightning_solo.nn.adapter_merging",
    "use_adapter": "lightning_solo.nn.adaptation",
    "merge_factors": "lightning_solo.nn.factorizing",
    "export_factorized": "lightning_solo.export.factorized",
    "export_graph": "lightning_solo.export.graphs",
    "export_pretrained": "lightning_solo.export.pretrained",
    "load_members": "lightning_solo.export.members",
    "export_quantized": "lightning_solo.export.quantized",
    "export_pruned": "lightning_solo.export.pruned",
    "load_pruned": "lightning_solo.export.pruned_structure",
    "export_weights": "lightning_solo.export.weights",
    "latest_checkpoint": "lightning_solo.checkpoint.manifest",
    "load_quantized": "lightning_solo.nn.quantized_loading",
    "SoloCLI": "lightning_solo.lightning_cli",
    "Plan": "lightning_solo.planner.plan",
    "plan": "lightning_solo.planner.preset_plans",
    "write_predictions": "lightning_solo.prediction.streaming",
    "write_soft_labels": "lightning_solo.export.soft_labels",
}


def __getattr__(name: str) -> Any:
    """Return a function of `_HOME`, or the class of one of this package's techniques."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    from lightning_solo.cards.catalogue import built_in_cards, load_class

    classes = {card.class_name: card for card in built_in_cards().values()} if not name.startswith("_") else {}
    if name == "__all__":
        exceptions = [name for name in vars(_errors) if name.endswith("Error")]
        return sorted([*_HOME, *exceptions, "callbacks", *(card.class_name for card in built_in_cards().values())])
    if name in classes:
        return load_class(classes[name])
    from lightning_solo.presets import old_spellings

    close = difflib.get_close_matches(name, [*_HOME, *classes], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise AttributeError(old_spellings.refusal(name) or f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__getattr__("__all__")])


class _Callbacks(ModuleType):
    """Makes the module `lightning_solo.callbacks` callable, because the function `callbacks` has its name."""

    def __call__(
        self,
        preset: str | Sequence[str] | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        allow: Sequence[str] = (),
        **arguments: Any,
    ) -> list[Any]:
        """See `lightning_solo.attach.callbacks`."""
        from lightning_solo import attach

        return attach.callbacks(preset, overrides, allow=allow, **arguments)


_room.__class__ = _Callbacks
