"""Replacement of one optimizer by another, with its hooks and learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer


def replace_optimizer(old: Optimizer, new: Optimizer, schedulers: Iterable[Any] = ()) -> None:
    """Move an optimizer's step hooks and schedulers, nested ones included, to another optimizer."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(new, name, getattr(old, name))
    if hasattr(old.step, "_wrapped_by_lr_sched"):
        _note_steps(new)
    for scheduler in schedulers:
        _bind(scheduler, old, new)


def _note_steps(optimizer: Optimizer) -> None:
    """Mark the optimizer's ``step`` as a scheduler's constructor does. Without it schedulers warn of a wrong order."""
    step: Any = type(optimizer).step
    reference = ref(optimizer)  # a cycle would delay the optimizer's end, when DeepSpeed frees its C++ half

    @wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        stepped: Any = reference()
        stepped._opt_called = True
        return step(stepped, *args, **kwargs)

    vars(noted)["_wrapped_by_lr_sched"] = True
    vars(optimizer)["step"] = noted


def _bind(scheduler: Any, old: Optimizer, new: Optimizer) -> None:
    """Attach a scheduler, and schedulers nested in it, to another optimizer."""
    if getattr(scheduler, "optimizer", None) is not old:
        return
    scheduler.optimizer = new
    for value in list(vars(scheduler).values()):
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(inner, (Tensor, Optimizer)):
                _bind(inner, old, new)
