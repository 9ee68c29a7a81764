"""Milestones of a schedule: the factor at a position, and the number of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Milestones = Sequence[Sequence[int]]


def factor_at(milestones: Milestones, position: float) -> int:
    """Return the factor of the last milestone that ``position`` has reached, and 1 before the first.

    >>> [factor_at([[2, 4], [5, 8]], position) for position in (0, 2, 4, 5, 9)]
    [1, 4, 4, 8, 8]
    """
    factor = 1
    for first, then in milestones:
        if position >= first:
            factor = then
    return factor


@dataclass(frozen=True)
class Epoch:
    """The size of an epoch."""

    batches: int  # number of batches
    batch_size: int = 0  # samples in each batch but the last; for schedules by samples
    samples: int = 0  # number of samples


def epoch_of(loader: Any, batches: int) -> Epoch | None:
    """Return the size of an epoch of ``batches`` batches; None if its number of samples is unknown."""
    sampler = getattr(loader, "sampler", None)
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(size, int) or not hasattr(sampler, "__len__"):
        return None
    return Epoch(batches, size, min(batches * size, len(sampler)))  # type: ignore[arg-type]


def count_optimizer_steps(milestones: Milestones, by: str, epoch: Epoch, epochs: int, max_steps: int = -1) -> int:
    """Return the number of optimizer steps in ``epochs`` epochs, at most ``max_steps`` unless -1.

    The cost depends on the number of milestones, not on the length of the run.

    >>> count_optimizer_steps([[0, 4]], "epoch", Epoch(batches=10), epochs=2)  # 4 + 4 + 2, twice
    6
    """
    firsts = sorted(first for first, _ in milestones)
    steps, done = 0, 0
    while epoch.batches > 0 and done < epochs and (max_steps == -1 or steps < max_steps):
        position = {"epoch": done, "step": steps, "samples": done * epoch.samples}[by]
        ahead = min((first - position for first in firsts if first > position), default=math.inf)
        per_epoch = math.ceil(epoch.batches / factor_at(milestones, position))
        whole = epochs - done
        if ahead != math.inf:  # the epochs in which no milestone is reached
            whole = min(whole, int(ahead) // {"epoch": 1, "step": per_epoch, "samples": epoch.samples}[by])
        if whole:
            steps, done = steps + whole * per_epoch, done + whole
        else:
            batch_idx, done = 0, done + 1
            while batch_idx < epoch.batches:
                place = steps if by == "step" else position + batch_idx * epoch.batch_size
                batch_idx, steps = batch_idx + factor_at(milestones, place), steps + 1
    return steps if max_steps == -1 else min(steps, max_steps)
