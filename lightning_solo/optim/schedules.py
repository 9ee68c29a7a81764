"""Factors of the learning rate over a run's optimizer steps."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(step: int, warmup_steps: int, total_steps: float) -> float:
    """Return the factor of the learning rate at ``step``: linear from near 0 to 1, then half a cosine down to 0.

    Without an end (``total_steps`` is infinite) it stays at 1 after the warm-up.

    >>> [round(warmup_cosine(step, 2, 6), 2) for step in range(7)]
    [0.33, 0.67, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    if step < warmup_steps and step < total_steps:
        return (step + 1) / (warmup_steps + 1)
    if math.isinf(total_steps):
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


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
