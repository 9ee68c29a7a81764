"""Optimizers whose step of a parameter depends on no other parameter: torch's SGD, AdamW, Adafactor..., and Lion."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.memory.sharded_tensors import local
from lightning_solo.optim.adamw_state_dict import WEIGHTS_ALONE, is_compact
from lightning_solo.optim.one_by_one import Lion


def _of_adafactor(group: Mapping[str, Any], p: Tensor) -> int:
    return p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.dim() > 1 and p.numel() else p.numel()


def _times(count: int) -> Callable[[Mapping[str, Any], Tensor], int]:
    return lambda group, p: count * p.numel()


_STATE_NUMBERS: dict[str, Callable[[Mapping[str, Any], Tensor], int]] = {
    "SGD": lambda group, p: p.numel() if group["momentum"] else 0,
    "Adam": lambda group, p: (3 if group["amsgrad"] else 2) * p.numel(),
    "AdamW": lambda group, p: (3 if group["amsgrad"] else 2) * p.numel(),
    "NAdam": _times(2),
    "RAdam": _times(2),
    "Adamax": _times(2),
    "Adagrad": _times(1),
    "Adadelta": _times(2),
    "RMSprop": lambda group, p: (1 + bool(group["momentum"]) + bool(group["centered"])) * p.numel(),
    "Rprop": _times(2),
    "ASGD": _times(1),
    "Adafactor": _of_adafactor,
    "Lion": _times(1),
}
"""Name of an optimizer -> fp32 numbers that it stores for a parameter."""

ONE_BY_ONE = tuple(_STATE_NUMBERS)
"""Names of these optimizers."""
SERVED = tuple(getattr(torch.optim, name, Lion) for name in ONE_BY_ONE)
"""Torch's own classes, and ours; a derived class may compute something else."""


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of fp32 states of a torch optimizer or a `MasterWeights`, without step counts."""
    kind = type(getattr(optimizer, "_inner", optimizer)).__name__
    return 4 * sum(_STATE_NUMBERS[kind](group, local(p)) for group in optimizer.param_groups for p in group["params"])


_ADAM = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
_STATE_NAMES = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adafactor: {"step", "row_var", "col_var", "variance"},
}
"""Class -> names of all states that it may have."""


def refuse_states_of_others(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Check that saved states have no name that is unknown to one of torch's classes, which load any state.

    Compact states have an error of their own.
    """
    known = _STATE_NAMES.get(type(optimizer))
    for state in state_dict.get("state", {}).values():
        if known is not None and not is_compact(state) and (others := sorted(set(state) - known)):
            raise CheckpointError(
                f"the checkpoint's optimizer has states {', '.join(others)}, which {type(optimizer).__name__} doesn't"
                f" have; resume with the optimizer of the run that saved them, or {WEIGHTS_ALONE}"
            )


Pairs = Sequence[tuple[Tensor, Tensor]]
"""Parameters with their gradients."""


def stepper(optimizer: Optimizer, option: str) -> Callable[[Pairs, float | None], None]:
    """Return a function (parameters and gradients, factor of the gradients; None: 1) that steps some parameters.

    Args:
        optimizer: of all of them.
        option: the path of the technique that asks, for messages.

    Raises:
        ConflictError: the optimizer isn't known to step each parameter by itself.
    """
    step_one = getattr(optimizer, "step_one", None)
    if step_one is not None:
        return partial(_one_by_one, step_one)
    kind = type(optimizer)
    if hasattr(optimizer, "back_end") or getattr(kind, "steps_alone", False):  # of `back_ends`, or ours
        return partial(step_together, optimizer)
    if kind not in SERVED:
        raise ConflictError(
            f"{option} with {kind.__name__}: known to step each parameter by itself are CompactAdamW and"
            f" torch's {', '.join(ONE_BY_ONE)}; write ~{option}"
        )
    return partial(step_together, optimizer)


def _one_by_one(step_one: Callable[..., None], pairs: Pairs, scale: float | None = None) -> None:
    for parameter, gradient in pairs:
        step_one(parameter, gradient, 1.0 if scale is None else scale)


def step_together(optimizer: Optimizer, pairs: Pairs, scale: float | None = None) -> None:
    """Step some parameters by an optimizer's own ``step``, which skips parameters without a gradient.

    The gradients are the caller's to give away: they are multiplied in place.
    """
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # for a whole step, not for a part of it
    hooks = {name: getattr(optimizer, name) for name in names}
    try:
        for parameter, gradient in pairs:
            parameter.grad = (gradient if scale is None else gradient.mul_(scale)).to(parameter.dtype)
        for name in names:
            setattr(optimizer, name, OrderedDict())
        optimizer.step()
    finally:
        for parameter, _ in pairs:
            parameter.grad = None
        for name, hook in hooks.items():
            setattr(optimizer, name, hook)
