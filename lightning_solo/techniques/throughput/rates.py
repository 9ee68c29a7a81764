"""Samples, tokens and model FLOPs per second of training, over the last batches."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

SAMPLES, TOKENS = "throughput/samples_per_s", "throughput/tokens_per_s"


class Totals(NamedTuple):
    """Seconds, samples, tokens and FLOPs since the start of the fit; validation excluded."""

    seconds: float
    samples: int
    tokens: int | None
    flops: int | None


class Rates:
    """Totals of the last batches, with a clock that runs only during training.

    Args:
        window_size: number of batches over which a rate is averaged.
        available_flops: operations per second of the device; None if unknown.
    """

    def __init__(self, window_size: int, available_flops: float | None = None) -> None:
        self.available_flops = available_flops
        self.totals: deque[Totals] = deque(maxlen=window_size)
        self.seconds = 0.0
        self.flops_of_batch = 0  # model FLOPs of the next batch; 0 if they were not counted
        self.counted: tuple[int | None, int | None] = (None, None)  # samples and tokens of which they are
        self._samples = 0
        self._tokens: int | None = 0
        self._flops = 0.0
        self._flops_per_unit: float | None = None  # of a token, or of a sample if tokens are unknown
        self._mark: float | None = None  # start of the running clock; None while it is stopped

    def resume(self) -> None:
        """Start the clock, unless it runs."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock; the time since the last batch does not count."""
        self._mark = None

    def add(self, samples: int | None, tokens: int | None) -> None:
        """Add a batch that ends now; a batch without samples adds only its time."""
        now = time.perf_counter()
        self.seconds += 0.0 if self._mark is None else now - self._mark
        self._mark = now
        if not samples:
            return
        self._samples += samples
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        units = samples if tokens is None else tokens
        if self.flops_of_batch and units:
            part = self.counted[0 if tokens is None else 1] or units
            self._flops_per_unit, self.flops_of_batch = self.flops_of_batch / min(part, units), 0
        self._flops += (self._flops_per_unit or 0.0) * units
        flops = None if self._flops_per_unit is None else round(self._flops)
        self.totals.append(Totals(self.seconds, self._samples, self._tokens, flops))

    @property
    def figures(self) -> dict[str, float]:
        """The rates over the batches in the window, by logged key; empty before the second batch.

        The first total marks the start of the window, so a slow first batch does not count.
        """
        if len(self.totals) < 2 or self.totals[-1].seconds <= self.totals[0].seconds:
            return {}
        first, last = self.totals[0], self.totals[-1]
        seconds = last.seconds - first.seconds
        figures = {SAMPLES: (last.samples - first.samples) / seconds}
        if first.tokens is not None and last.tokens is not None:
            figures[TOKENS] = (last.tokens - first.tokens) / seconds
        if first.flops is not None and last.flops is not None:
            flops_per_s = (last.flops - first.flops) / seconds
            figures["throughput/model_tflops_per_s"] = flops_per_s / 1e12
            if self.available_flops:
                figures["throughput/mfu"] = flops_per_s / self.available_flops
        return figures
