"""The gradient's noise scale: how many samples a batch needs until its gradient is more signal than noise.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

AVERAGED = 50
"""Measurements over which the averages run, and that an estimate needs. A single one can be wrong by any factor, since
noise and signal are differences of two noisy norms."""


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Return the squared norm of all gradients together, in fp32 at least; waits for the device."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0


def noise_and_signal(small: float, small_batch: float, large: float, large_batch: float) -> tuple[float, float]:
    """Return unbiased estimates of noise, the covariance's trace, and signal, the true gradient's squared norm.

    Args:
        small: squared norm of the mean gradient of a small batch.
        small_batch: its samples.
        large: squared norm of the mean gradient of a large batch that includes the small one.
        large_batch: its samples.

    >>> noise_and_signal(1 + 8 / 2, 2, 1 + 8 / 4, 4)  # the expected norms of a noise of 8 and a signal of 1
    (8.0, 1.0)
    """
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    return noise, signal


class NoiseScale:
    """The ratio of moving averages of noise and signal, in samples; None until enough measurements exist."""

    def __init__(self) -> None:
        self._noise = self._signal = 0.0
        self._count = 0

    def add(self, small: float, small_batch: float, large: float, large_batch: float) -> None:
        """Add a measurement, with the arguments of `noise_and_signal`; skip one that isn't finite."""
        noise, signal = noise_and_signal(small, small_batch, large, large_batch)
        if not (math.isfinite(noise) and math.isfinite(signal)):
            return
        # both averages begin at 0 and are too small by the same factor, which cancels in the ratio
        self._noise += (noise - self._noise) / AVERAGED
        self._signal += (signal - self._signal) / AVERAGED
        self._count += 1

    @property
    def value(self) -> float | None:
        """Batch size at which noise equals signal; None before `AVERAGED` measurements and without a signal."""
        return max(self._noise, 0.0) / self._signal if self._count >= AVERAGED and self._signal > 0 else None

    def state(self) -> list[float]:
        """Return the averages and the count, as plain data."""
        return [self._noise, self._signal, self._count]

    def load(self, state: Sequence[float]) -> None:
        """Load the averages of a checkpoint."""
        self._noise, self._signal = map(float, state[:2])
        self._count = int(state[2])
