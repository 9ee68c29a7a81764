"""Find losses that are far above those of the last steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from operator import mul

STEPS = 128
"""Losses that the mean and the standard deviation are taken of."""
LEAST = 64
"""Losses before which nothing is a spike."""
SIGMAS = 6.0
"""Standard deviations above the mean from which a loss is a spike."""
LEAST_SIGMA = 1e-3
"""Least standard deviation, as a share of the mean: where losses are equal, a rounding is no spike."""


class Spikes:
    """The losses of the last steps.

    >>> losses = Spikes()
    >>> for step in range(64):
    ...     losses.add(1.0 + step % 2)
    >>> losses.bound()
    4.5
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.losses: deque[float] = deque(losses, maxlen=STEPS)
        self._sum_up()

    def _sum_up(self) -> None:
        self._sum, self._squares = sum(self.losses), sum(map(mul, self.losses, self.losses))
        self._until = STEPS  # losses that are added before the sums are taken anew, which ends their rounding

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        first = self.losses[0] if len(self.losses) == STEPS else 0.0
        self.losses.append(loss)
        self._sum += loss - first
        self._squares += loss * loss - first * first
        self._until -= 1
        if not self._until or first * first > self._squares:  # a large one leaves only rounding
            self._sum_up()

    def bound(self) -> float:
        """Return the largest loss that isn't a spike; infinity before there are enough losses."""
        count = len(self.losses)
        if count < LEAST:
            return math.inf
        mean = self._sum / count
        variance = max(0.0, self._squares / count - mean * mean)
        return mean + SIGMAS * max(math.sqrt(variance), LEAST_SIGMA * abs(mean))
