"""How many samples a micro-batch has: fewer after an out-of-memory error, carefully more when it has long fitted."""

from __future__ import annotations

GROW_AFTER = 100
"""Steps that fit before a larger micro-batch is tried; after each try that failed twice as many."""


class MicroBatchSize:
    """The largest micro-batch that is allowed, learned from what fits and what doesn't.

    An out-of-memory error halves it. When it has fitted for `GROW_AFTER` steps, the middle between it and what was too
    large is tried, once; so bisection comes near to the largest that fits. When there is nothing between them, what was
    too large is tried again, since a longer sequence or fragmented memory may have been the reason.

    Args:
        most: samples that are never exceeded; None for the whole batch.

    >>> size = MicroBatchSize(None)
    >>> size.failed(64); size.now
    32
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.now = most
        self.too_large: int | None = None
        self.wait = GROW_AFTER
        self.fitted_for = 0
        self.before_try: int | None = None

    def of(self, samples: int) -> int:
        """Return the samples of a micro-batch of a batch with so many."""
        return samples if self.now is None else min(self.now, samples)

    def failed(self, samples: int) -> None:
        """Note that micro-batches of so many samples were too large.

        Raises:
            ValueError: of a single sample, which has no half.
        """
        if samples < 2:
            raise ValueError("a micro-batch of one sample can't be made smaller")
        if self.before_try is not None and self.before_try < samples:
            self.now, self.wait = self.before_try, 2 * self.wait
        else:
            self.now = samples // 2
        self.before_try = None
        self.too_large = samples
        self.fitted_for = 0

    def fitted(self, samples: int) -> int | None:
        """Note that a step with batches of so many samples has fitted; return the size to try next, or None."""
        if self.now is None or self.too_large is None:
            return None
        count = -(-samples // self.now)
        largest = -(-samples // count)
        if self.before_try is not None and largest <= self.before_try:  # this batch is small: it says nothing of a try
            return None
        self.before_try = None
        self.fitted_for += 1
        if self.fitted_for < self.wait:
            return None
        if count == 1:  # this batch is small: a larger micro-batch would be the same
            return None
        larger = max((self.now + self.too_large) // 2, -(-samples // (count - 1)))
        larger = min(larger, self.most or larger)
        if larger <= self.now:
            return None
        self.before_try, self.now, self.fitted_for = self.now, larger, 0
        return larger

    def state(self) -> dict[str, int | None]:
        """Return what is known, as plain data; a try that isn't over counts as not begun."""
        now = self.now if self.before_try is None else self.before_try
        return {"micro_batch": now, "too_large": self.too_large, "wait": self.wait, "fitted_for": self.fitted_for}

    def load(self, state: dict[str, int | None]) -> None:
        """Take over what another run has learned; ``most`` stays."""
        now, too_large = state["micro_batch"], state["too_large"]
        self.now = now if self.most is None or (now is not None and now <= self.most) else self.most
        self.too_large, self.before_try = too_large, None
        self.wait, self.fitted_for = int(state["wait"] or GROW_AFTER), int(state["fitted_for"] or 0)
