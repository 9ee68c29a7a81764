"""Uniform numbers that depend only on position and step, so that a resumed run draws the same ones.

Over steps each element's numbers are independent; over the elements of one step they are a low-discrepancy sequence in
two dimensions, whose mean over any stretch is nearer to one half than that of independent ones.

Source: M. Roberts, The unreasonable effectiveness of quasirandom sequences (2018): multiples of 1/p and 1/p**2, where
p is the root of p**3 = p + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PER_ROW = 3242174889 - 2**32  # 2**32 / p, less 2**32: compiled for a GPU it is multiplied in int32
_PER_COLUMN = 0.5698402909980532  # 1 / p**2


def uniform(rows: int, columns: int, first_row: int, seed: int, device: torch.device) -> Tensor:
    """Return numbers in [0, 1), fp32 of shape (rows, columns).

    Args:
        rows: how many; each is a block of a parameter.
        columns: at most 128, or fewer bits of the numbers are random.
        first_row: which block of the parameter is the first.
        seed: below 2**32, such as `seed_of` gives.
        device: where they are wanted.
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
