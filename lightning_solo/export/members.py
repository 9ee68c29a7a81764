"""The members of a checkpoint's average, as modules whose predictions are averaged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from lightning_solo.errors import CheckpointError, listed
from lightning_solo.export.sources import checkpoint_of, read
from lightning_solo.optim.averages import MEMBERS


def load_members(module: Any, checkpoint: str | Path) -> list[Any]:
    """Return a copy of a module, in evaluation mode, for each member in a checkpoint, the latest last.

    Args:
        module: of the run's class; it stays as it is.
        checkpoint: a file, or a run's folder; of a run with ``weight_averaging`` and ``members`` above 0.

    Raises:
        CheckpointError: it can't be read, has no members, or members of another module.
    """
    path = checkpoint_of(Path(checkpoint))
    states = read(path, inert=True).get("callbacks", {}).values()
    members = [member for state in states if isinstance(state, dict) for member in state.get(MEMBERS, ())]
    if not members:
        raise CheckpointError(
            f"{path}: it has no members of an average; train with callback.weight_averaging.members=4, and"
            " callback.weight_averaging.cycles=true where the schedule has cycles"
        )
    return [_with(module, member, path) for member in members]


def _with(module: Any, weights: dict[str, Any], path: Path) -> Any:
    made = copy.deepcopy(module).eval()
    parameters = dict(made.named_parameters())
    wrong = [name for name, each in weights.items() if getattr(parameters.get(name), "shape", None) != each.shape]
    if wrong:
        raise CheckpointError(f"{path}: its members aren't of this {type(module).__name__}, in {listed(wrong)}")
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    return made
