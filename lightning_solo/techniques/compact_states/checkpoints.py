"""Compact states in a checkpoint: bf16 weights with corrections, or fp32 master weights without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.master_weights import MasterWeights

WITH_MASTERS = (CompactAdamW, MasterWeights)
"""Optimizers that hold master weights."""


def with_master_weights(
    weights: Mapping[str, Any], module: nn.Module, optimizers: Iterable[Optimizer]
) -> dict[str, Any]:
    """Return a module's state dict with fp32 master weights, on the host."""
    joined = dict(weights)
    holders = [optimizer for optimizer in optimizers if isinstance(optimizer, WITH_MASTERS)]
    held: dict[Tensor, Any] = {p: each for each in holders for group in each.param_groups for p in group["params"]}
    for name, p in module.named_parameters(remove_duplicate=False):
        if name in joined and p in held:
            joined[name] = held[p].master_weight(p).cpu()  # all at once might not fit on the device
    return joined


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
