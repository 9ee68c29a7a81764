"""The size of micro-batches: smaller after an out-of-memory error, larger again after a while."""

from __future__ import annotations

GROW_AFTER = 100
"""Number of steps that fit before a larger micro-batch is tried; each failed try doubles it."""


class MicroBatchSize:
    """The largest allowed micro-batch, learned from the sizes that fit and those that don't.

    An out-of-memory error halves it. After `GROW_AFTER` steps that fit, the middle between the current size and the
    size that failed last is tried; this bisection approaches the largest size that fits. If no size is left in between,
    the failed size is tried again, since it may have failed for a long sequence or fragmented memory; if it fits,
    doubled sizes are tried. Each failed try permanently doubles the wait, so at most log2(n / `GROW_AFTER`) + 1 of n
    steps are failed tries.

    Args:
        maximum: largest number of samples; None for the whole batch.

    >>> size = MicroBatchSize(None)
    >>> size.failed(64); size.current
    32
    """

    def __init__(self, maximum: int | None = None) -> None:
        self.maximum = maximum
        self.current = maximum
        self.too_large: int | None = None
        self.wait = GROW_AFTER
        self.fitted_for = 0
        self.before_try: int | None = None

    def failed(self, samples: int) -> None:
        """Record that micro-batches of this many samples were too large.

        Raises:
            ValueError: for a single sample, which can't be halved.
        """
        if samples < 2:
            raise ValueError("a micro-batch of one sample can't be made smaller")
        if self.before_try is not None and self.before_try < samples:
            self.current, self.wait = self.before_try, 2 * self.wait
        else:
            self.current = samples // 2
        self.before_try = None
        self.too_large = samples
        self.fitted_for = 0

    def fitted(self, samples: int) -> int | None:
        """Record that a step with batches of this many samples fitted; return the size to try next, or None."""
        if self.current is None or self.too_large is None:
            return None
        count = -(-samples // self.current)
        largest = -(-samples // count)
        if self.before_try is not None and largest <= self.before_try:  # this batch is too small for the try
            return None
        self.before_try = None
        self.fitted_for += 1
        if self.fitted_for < self.wait:
            return None
        if count == 1:  # this batch is small: a larger micro-batch would be the same
            return None
        larger = max((self.current + self.too_large) // 2, -(-samples // (count - 1)))
        if self.current >= self.too_large:  # memory was short for a while
            larger = min(2 * self.current, samples)
        larger = min(larger, self.maximum or larger)
        if larger <= self.current:
            return None
        self.before_try, self.current, self.fitted_for = self.current, larger, 0
        return larger

    def state(self) -> dict[str, int | None]:
        """Return the state as plain data, without an unfinished try."""
        current = self.current if self.before_try is None else self.before_try
        return {"micro_batch": current, "too_large": self.too_large, "wait": self.wait, "fitted_for": self.fitted_for}

    def load(self, state: dict[str, int | None]) -> None:
        """Load the state of another run, with this object's ``maximum``."""
        current, too_large = state["micro_batch"], state["too_large"]
        self.current = (
            current if self.maximum is None or (current is not None and current <= self.maximum) else self.maximum
        )
        self.too_large, self.before_try = too_large, None
        self.wait, self.fitted_for = int(state["wait"] or GROW_AFTER), int(state["fitted_for"] or 0)
