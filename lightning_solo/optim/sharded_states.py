"""Optimizer states of sharded parameters, from and to the whole states of a file.

Compact states are flat tensors of a process's shard. Moments in 8 or 4 bits have blocks of 128 numbers. Where shards
end within a block, moments are fp32 in the file, which every run reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.memory.sharded_tensors import (
    gathered,
    gathered_flat,
    is_sharded,
    shard_numel,
    sharded_like,
    span,
)
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.adamw_state_dict import unmarked
from lightning_solo.optim.adamw_states import plain
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.split_optimizer import SplitOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
Flat = tuple[str, ...]
"""Names of states that are flat tensors of a shard."""


def gathered_states(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Return an optimizer's state dict with whole states; all processes must call it.

    ``keep``: whether this process keeps them; else what was sharded is None.
    """
    states = optimizer.state_dict()
    parameters, flat = _numbered(optimizer, states), _flat_states(optimizer)
    whole = {key: _gathered(parameters[key], state, flat, keep) for key, state in states["state"].items()}
    return {**gathered({**states, "state": {}}, keep), "state": whole}


def load_states(optimizer: Optimizer, states: Mapping[str, Any]) -> None:
    """Load whole optimizer states, as a plain run saves them, into an optimizer of sharded parameters."""
    states, flat = unmarked(states), _flat_states(optimizer)
    parameters = _numbered(optimizer, states)
    placed = {key: _placed(parameters[key], state, flat) for key, state in states["state"].items()}
    optimizer.load_state_dict({**states, "state": placed})


def restore_optimizer(optimizer: Optimizer, whole: Mapping[Tensor, nn.Parameter], keep: bool) -> None:
    """Give an optimizer whole parameters in place of sharded ones, and its whole states if this process keeps them."""
    for group in optimizer.param_groups:
        group["params"] = [whole.get(p, p) for p in group["params"]]
    flat = _flat_states(optimizer)
    states = {whole.get(p, p): _gathered(p, state, flat, keep) for p, state in optimizer.state.items()}
    if isinstance(optimizer, SplitOptimizer):
        optimizer.replace_parameters(whole)
    optimizer.state.clear()
    if keep:
        optimizer.state.update(states)


def _numbered(optimizer: Optimizer, states: Mapping[str, Any]) -> dict[int, Tensor]:
    keys = [key for group in states["param_groups"] for key in group["params"]]
    return dict(zip(keys, parameters_of(optimizer), strict=True))


def _flat_states(optimizer: Optimizer) -> Flat:
    return optimizer.flat_states if isinstance(optimizer, SplitOptimizer) else ()


def _gathered(p: Tensor, state: Mapping[str, Any], flat: Flat, keep: bool) -> dict[str, Any]:
    whole = dict(state)
    if is_sharded(p):
        if "exp_avg_scale" in state and _cuts_blocks(p):
            whole = {name: value for name, value in state.items() if not name.startswith("exp_avg")}
            whole |= {name: value for name, value in plain(p, state).items() if name in MOMENTS}
        for name, value in whole.items():
            if name in flat and value.dim() == 1 and not is_sharded(value):
                whole[name] = gathered_flat(value.to(p.device), p, keep)
    return {name: gathered(value, keep) for name, value in whole.items()}


def _cuts_blocks(p: Any) -> bool:
    """Return whether blocks of moments would be in two shards."""
    return shard_numel(p) < p.numel() and shard_numel(p) % moments.BLOCK != 0


def _placed(p: Tensor, state: Mapping[str, Any], flat: Flat) -> dict[str, Any]:
    """Return this process's part of a parameter's whole state."""
    if not is_sharded(p):
        return dict(state)
    is_coded = "exp_avg_scale" in state
    if is_coded and _cuts_blocks(p):
        wide = plain(torch.empty(p.shape, dtype=p.dtype), state)
        state, is_coded = {**state, **wide}, False
        state = {name: value for name, value in state.items() if not name.endswith("_scale")}
    placed = {}
    for name, value in state.items():
        if name not in flat or value.dim() != 1:
            placed[name] = sharded_like(value, p)
            continue
        bits = moments.BITS[state["exp_avg"].dtype] if is_coded and name in MOMENTS else 0
        first, last = span(p)[0], sum(span(p))
        if name.endswith("_scale"):
            first, last = first // moments.BLOCK, moments.blocks(last)
        elif bits == 4:
            first, last = first // 2, -(-last // 2)
        placed[name] = value[first:last]
    return placed
