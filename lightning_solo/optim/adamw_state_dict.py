"""Check and convert the state dicts of `CompactAdamW`, from and to those of torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError
from lightning_solo.optim.adamw_states import (
    Layout,
    compress,
    correction_of,
    described,
    is_alike,
    is_plain,
    new_state,
    plain,
)
from lightning_solo.optim.back_end_facts import SETTINGS
from lightning_solo.optim.compressed_moments import BITS as MOMENT_BITS
from lightning_solo.optim.param_groups import name_in, parameters_of, saved_states
from lightning_solo.optim.split_weights import bits_of

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Options of torch's AdamW and Adam that have no compact form."""
WEIGHTS_ALONE = "start from its weights alone: MyModule.load_from_checkpoint(path), and fit without ckpt_path"
"""The remedy where optimizer states can't be loaded."""
CONVERT = "lightning-solo convert FILE --to plain"
"""The command that makes a plain checkpoint of a compact one."""
_STEPS = "steps"  # the count of steps in a marked state, whose "step" is a message
_REFUSAL = f"compact states, which a plain run can't read: write {CONVERT}".encode()


def loadable_states(
    optimizer: Optimizer, state_dict: Mapping[str, Any], layout: Callable[[Tensor], Layout]
) -> dict[Tensor, dict[str, Any]]:
    """Return the saved state of each parameter, of a `CompactAdamW` or torch's AdamW; empty where the file has none.

    Raises:
        CheckpointError: groups, names, sizes or bits differ, tensors are missing, or an option is `UNSUPPORTED`.
    """
    state_dict = unmarked(state_dict)
    require_supported(state_dict)
    _require_same_names(state_dict["param_groups"], optimizer.param_groups)
    states = saved_states(optimizer, state_dict)
    for p, state in states.items():
        whole, without = layout(p), {name: value for name, value in state.items() if name != "correction"}
        moments = {name: size for name, size in whole.items() if name != "correction"}
        correction = {name: size for name, size in whole.items() if name == "correction"}
        has_its_bits = any(is_alike(correction_of(state), each) for each in ({}, correction))
        is_alike_here = any(is_alike(state, each) for each in ({}, correction, moments, whole))
        if not is_alike_here and not (has_its_bits and is_plain(without, p)):
            raise CheckpointError(
                f"the states of {name_in(optimizer, p)}: {described(state)} in the file, {described(whole)} here;"
                f" resume with the bits of the file, {_bits(states)}; convert it by {CONVERT}, which any bits resume;"
                f" or {WEIGHTS_ALONE}"
            )
    return states


def _bits(states: Mapping[Tensor, Mapping[str, Any]]) -> str:
    """Return the settings that saved states have."""
    masters = {bits_of(state["correction"]) for state in states.values() if "correction" in state}
    types = {state["exp_avg"].dtype for state in states.values() if isinstance(state.get("exp_avg"), Tensor)}
    coded = {MOMENT_BITS[kind] for kind in types - {torch.float32} if kind in MOMENT_BITS}
    bits = "".join(f"{SETTINGS}.master_bits={each} " for each in masters)
    return f"{bits}{SETTINGS}.moment_bits={max(coded, default=32)}"


def loaded_state(
    p: Tensor, saved: Mapping[str, Tensor], layout: Layout, home: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a copy of a saved state: in the host tensors ``home`` if there are any, else on the device."""
    if not set(saved) - {"correction"}:  # before its first step
        return {name: home[name].copy_(x) if home else x.to(p.device, copy=True) for name, x in saved.items()}
    state = new_state(layout, p.device, home)
    moments = {name: x for name, x in saved.items() if name != "correction"}
    if is_plain(moments, p):
        compress(state, p, moments)
        saved = correction_of(saved)
    for name, value in saved.items():
        state[name].copy_(value)
    return state


def marked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return compact states that torch's optimizers refuse to load, by an error that names the remedy.

    A Trainer without this package loads them into the user's own optimizer. That one takes a count of steps that is no
    tensor by ``float``, whose error shows the text. SGD alone has no such count.
    """
    states = {key: _marked(state) if state else state for key, state in state_dict["state"].items()}
    return {**state_dict, "state": states}


def _marked(state: Mapping[str, Any]) -> dict[str, Any]:
    return {_STEPS if name == "step" else name: value for name, value in state.items()} | {"step": _REFUSAL}


def is_compact(state: Mapping[str, Any]) -> bool:
    """Return whether a state is recognisable as one of a compact optimizer, without its parameter."""
    return "correction" in state or "exp_avg_scale" in state or isinstance(state.get("step"), bytes)


def unmarked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that were `marked`; others as they are."""
    states = {key: _unmarked(state) for key, state in state_dict.get("state", {}).items()}
    return {**state_dict, **({"state": states} if "state" in state_dict else {})}


def _unmarked(state: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(state.get("step"), bytes):
        return dict(state)
    return {"step" if name == _STEPS else name: value for name, value in state.items() if name != "step"}


def require_plain(p: Tensor, state: Mapping[str, Any], name: str, optimizer: str) -> None:
    """Refuse to load a compact optimizer's state into an optimizer that would misread it."""
    moment = state.get("exp_avg")
    is_flat = isinstance(moment, Tensor) and moment.dim() == 1 and p.dim() > 1
    if is_compact(state) or is_flat:
        raise CheckpointError(
            f"the checkpoint has compact states of {name}, which {optimizer} can't read; resume under the preset that"
            f" saved it (compact, compact_states, ...), convert it by {CONVERT}, or {WEIGHTS_ALONE}"
        )


def require_plain_states(optimizer: Optimizer) -> None:
    """Refuse to load compact states into one of torch's optimizers; other optimizers check their states themselves."""
    if type(optimizer).__module__.startswith("torch.optim."):
        for p, state in optimizer.state.items():
            require_plain(p, state, name_in(optimizer, p), type(optimizer).__name__)


def plain_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of a `CompactAdamW` in the form of torch's AdamW, with fp32 states."""
    state_dict = optimizer.state_dict()
    parameters = parameters_of(optimizer)
    stepped = {key: state for key, state in state_dict["state"].items() if "step" in state}
    return {**state_dict, "state": {key: plain(parameters[key], state) for key, state in stepped.items()}}


def require_supported(state_dict: Mapping[str, Any]) -> None:
    """Refuse a state dict that is not of AdamW or Adam, or has an `UNSUPPORTED` option."""
    for name in ("state", "param_groups"):
        if name not in state_dict:
            raise CheckpointError(f"states of an optimizer without {name}: there are {', '.join(state_dict) or 'none'}")
    for number, group in enumerate(state_dict["param_groups"]):
        for name in ("params", "lr", "betas", "eps", "weight_decay"):
            if name not in group:
                raise CheckpointError(f"group {number} in the file has no {name}: it is not of AdamW or Adam")
        for name in UNSUPPORTED:
            if group.get(name):
                raise CheckpointError(f"group {number} in the file has {name}=True, which CompactAdamW doesn't support")


def _require_same_names(saved: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> None:
    for saved_group, group in zip(saved, groups, strict=False):
        theirs, ours = saved_group.get("param_names"), group.get("param_names")
        if theirs and ours and list(theirs) != list(ours):
            pair = next(((a, b) for a, b in zip(theirs, ours, strict=False) if a != b), ("more or fewer", "parameters"))
            raise CheckpointError(f"states of {pair[0]} in the file where this optimizer has {pair[1]}")
