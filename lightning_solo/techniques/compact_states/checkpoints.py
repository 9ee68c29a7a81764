"""Compact states in a checkpoint: bf16 weights with corrections, or fp32 master weights without.

States of another optimizer than AdamW are torch's own. Their weights are saved in fp32 in both forms, so that a plain
run resumes exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_solo.memory.sharded_tensors import is_sharded
from lightning_solo.optim.adamw_state_dict import marked
from lightning_solo.optim.checkpoint_masters import RECORD, masters_of, record, with_masters, with_sharded_masters
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.master_weights import MasterWeights
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint
from lightning_solo.techniques.compact_states.weights import WeightSplit

WITH_MASTERS = (CompactAdamW, MasterWeights)
"""Optimizers that hold master weights."""


class CompactCheckpoint(Checkpoint):
    """How compact states are saved and loaded.

    Args:
        ctx: the run.
        weights: the split weights of the module.
        form: "bf16" or "fp32", the weights to save.
    """

    def __init__(self, ctx: Run, weights: WeightSplit, form: str) -> None:
        self._ctx = ctx
        self._weights = weights
        self._form = form

    def loading_weights(self) -> AbstractContextManager[Any]:
        """Return a context in which split weights are loaded one by one, in fp32."""
        return self._weights.loading()

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states to where they are stored, and master weights from fp32 weights in the checkpoint."""
        with patches.states_stay(self._ctx.home):  # in the optimizers' place
            proceed(checkpoint)
        set_master_weights(self._ctx.strategy.optimizers, self._ctx.module, checkpoint["state_dict"])

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the bf16 weights, or fp32 master weights of optimizers whose states are plain, or of all."""
        optimizers = [each for each in self._ctx.strategy.optimizers if not self._has_corrections(each)]
        if any(map(is_sharded, self._ctx.module.parameters())):
            return with_sharded_masters(weights, self._ctx.module, optimizers)
        return with_masters(weights, masters_of(self._ctx.module, optimizers))

    def saved_states(self, optimizer: Optimizer, states: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's states; without corrections if the weights are fp32."""
        kept = states if self._has_corrections(optimizer) else without_corrections(states)
        return marked(kept) if isinstance(optimizer, CompactAdamW) else kept

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with a record of the optimizers' parameters."""
        return {**checkpoint, RECORD: record(self._ctx.module, self._ctx.strategy.optimizers)}

    def _has_corrections(self, optimizer: Optimizer) -> bool:
        return self._form == "bf16" and isinstance(optimizer, CompactAdamW)


def without_corrections(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict without corrections, which are part of fp32 weights."""
    kept = {
        key: {name: value for name, value in state.items() if name != "correction"}
        for key, state in states["state"].items()
    }
    return {**states, "state": kept}


def set_master_weights(optimizers: Iterable[Optimizer], module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Set the master weights to a checkpoint's fp32 weights, where it has them."""
    for optimizer in optimizers:
        if isinstance(optimizer, WITH_MASTERS):
            for name, p in module.named_parameters():
                if name in weights and weights[name].dtype == torch.float32:
                    optimizer.set_master_weight(p, weights[name])
