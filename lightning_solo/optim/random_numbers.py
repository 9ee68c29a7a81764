"""Uniform numbers that depend only on position and step, so that a resumed run draws the same ones.

The numbers of one element are independent from step to step. The numbers of one step are a low-discrepancy sequence in
two dimensions: their mean over any stretch is nearer to one half than that of independent numbers.

Source: M. Roberts, The unreasonable effectiveness of quasirandom sequences (2018): multiples of 1/p and 1/p**2, where
p is the root of p**3 = p + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PER_ROW = 3242174889 - 2**32  # 2**32 / p, minus 2**32, to fit in int32, in which a GPU multiplies it
_PER_COLUMN = 0.5698402909980532  # 1 / p**2


def uniform(rows: int, columns: int, first_row: int, seed: int, device: torch.device) -> Tensor:
    """Return numbers in [0, 1), fp32 of shape (rows, columns).

    Args:
        rows: blocks of a parameter.
        columns: elements of a block; above 128, fewer bits of the numbers are random.
        first_row: number of the first block in its parameter.
        seed: below 2**32, such as `seed_of` returns.
        device: of the numbers.
    """
    row = torch.arange(rows, device=device, dtype=torch.int64) + first_row
    start = (((row * _PER_ROW + seed) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    numbers = start[:, None] + torch.arange(columns, device=device, dtype=torch.float32) * _PER_COLUMN
    return numbers - numbers.floor()


def seed_of(step: int, index: int, purpose: int = 0) -> int:
    """Return a 32-bit hash of (step, index of a parameter, purpose), by splitmix64's finalizer.

    >>> seed_of(1, 0) == seed_of(1, 0) != seed_of(2, 0)
    True
    """
    x = (step * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + purpose * 0xABC98388FB8FAC03) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 32
