"""How many samples a micro-batch has: fewer after an out-of-memory error, carefully more when it has long fitted."""

from __future__ import annotations

GROW_AFTER = 100
"""Steps that fit before a larger micro-batch is tried; after each try that failed twice as many."""


class MicroBatchSize:
    """The largest micro-batch that is allowed, learned from what fits and what doesn't.

    An out-of-memory error halves it. When it has fitted for `GROW_AFTER` steps, the middle between it and what was too
    large is tried, once; so bisection comes near to the largest that fits. When there is nothing between them, what was
    too large is tried again, since a longer sequence or fragmented memory may have been the reason; where that fits, it
    is doubled. Each try that fails doubles the wait, for good: of n steps at most log2(n / `GROW_AFTER`) + 1 are tries
    that fail.

    Args:
        maximum: samples that are never exceeded; None for the whole batch.

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
        """Note that micro-batches of so many samples were too large.

        Raises:
            ValueError: of a single sample, which has no half.
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
        """Note that a step with batches of so many samples has fitted; return the size to try next, or None."""
        if self.current is None or self.too_large is None:
            return None
        count = -(-samples // self.current)
        largest = -(-samples // count)
        if self.before_try is not None and largest <= self.before_try:  # this batch is small: it says nothing of a try
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
        """Return what is known, as plain data; a try that isn't over counts as not begun."""
        current = self.current if self.before_try is None else self.before_try
        return {"micro_batch": current, "too_large": self.too_large, "wait": self.wait, "fitted_for": self.fitted_for}

    def load(self, state: dict[str, int | None]) -> None:
        """Take over what another run has learned; ``maximum`` stays."""
        current, too_large = state["micro_batch"], state["too_large"]
        self.current = (
            current if self.maximum is None or (current is not None and current <= self.maximum) else self.maximum
        )
        self.too_large, self.before_try = too_large, None
        self.wait, self.fitted_for = int(state["wait"] or GROW_AFTER), int(state["fitted_for"] or 0)
