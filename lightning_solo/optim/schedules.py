"""Factors of the learning rate over a run's optimizer steps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

SCHEDULES = ("constant", "linear", "cosine", "wsd")
"""Names of schedules, which follow a linear warm-up."""


def factor_at(
    step: int,
    schedule: str = "cosine",
    *,
    warmup_steps: int = 0,
    total_steps: float = math.inf,
    decay_share: float = 0.2,
) -> float:
    """Return the factor of the learning rate at ``step``: linear from near 0 to 1, then as the schedule says.

    Without an end (``total_steps`` is infinite) it stays at 1 after the warm-up.

    Args:
        step: number of optimizer steps before this one.
        schedule: constant; linear or cosine down to 0 at the end; or wsd (warm-up, stable, decay): 1, then linear down
            to 0.
        warmup_steps: steps until the factor is 1.
        total_steps: steps of the run.
        decay_share: share of the run's steps in which wsd decays.

    >>> [round(factor_at(step, warmup_steps=2, total_steps=6), 2) for step in range(7)]
    [0.33, 0.67, 1.0, 0.85, 0.5, 0.15, 0.0]
    >>> [round(factor_at(step, "wsd", warmup_steps=1, total_steps=10, decay_share=0.4), 2) for step in range(11)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup_steps and step < total_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or math.isinf(total_steps):
        return 1.0
    if 0 < total_steps <= step:
        return 0.0
    start = max(warmup_steps, total_steps * (1 - decay_share)) if schedule == "wsd" else warmup_steps
    progress = max(0.0, step - start) / max(1, total_steps - start)
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress


def scheduled(optimizer: Optimizer, schedule: str = "cosine", **options: Any) -> dict[str, Any]:
    """Return what ``configure_optimizers`` returns for an optimizer with a schedule that counts optimizer steps.

    Args:
        optimizer: of any kind; a schedule-free one gets the warm-up alone.
        schedule: one of `SCHEDULES`.
        options: as `factor_at`.
    """
    schedule = "constant" if getattr(optimizer, "averages", False) else schedule
    scheduler = LambdaLR(optimizer, partial(factor_at, schedule=schedule, **options))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def continued_rates(scheduler: LambdaLR) -> list[float]:
    """Set the learning rates that a restored schedule has at its step; return them, or [] if they were set already.

    A checkpoint has the rates of the schedule that it was saved by, whose end may have been another one.
    """
    groups = scheduler.optimizer.param_groups
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [float(base) * factor(scheduler.last_epoch) for base, factor in pairs]
    if [float(group["lr"]) for group in groups] == rates:
        return []
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate
    scheduler._last_lr = list(rates)
    return rates
