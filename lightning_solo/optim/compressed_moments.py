"""Adam's moments in 8 or 4 bits per number: codes, and one fp32 scale for each block of 128 numbers.

8 bits, per number of a block whose largest magnitude is the scale s:

- ``exp_avg``: ``round(127 * 2x / (1 + |x|))`` of x = value / s, int8. Codes are dense near 0, where most values are.
- ``exp_avg_sq``: the code c stands for ``s * (c / 255)**2``, uint8. It is rounded up or down at random, so that the
  mean is the value. A step may change it by 0.1 %, which rounding to the nearest code would undo each time. A number
  other than 0 is never rounded to 0, since the update divides by its root.

FlashOptim (arXiv 2602.23349) has the same two curves in blocks of 32, rounds both to the nearest code, and both may
become 0. torchao and bitsandbytes have a table of 256 codes, spaced by powers of ten, in blocks of 256, and round to
the nearest.

Compared with fp32 moments, an update (exp_avg / sqrt(exp_avg_sq)) is 3.8 % off after 400 steps; 10 % if both are
rounded to the nearest code; 14.5 % with torchao's table (`python examples/measure_moments.py --steps 400`; torch
2.13.0, a CPU).

4 bits: torchao's codes (arXiv 2309.01507), two to a byte, in the same blocks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_solo.errors import CapabilityError
from lightning_solo.machine import is_installed

BLOCK = 128
MOMENT_BITS = (32, 8, 4)
BITS = {torch.float32: 32, torch.int8: 8, torch.uint8: 4}
"""Type of the stored ``exp_avg`` -> its bits."""
LEAST = 4096
"""Parameters with fewer elements keep moments in fp32: norms and biases are sensitive and small."""

_TINY, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def blocks(numel: int) -> int:
    """Return the number of blocks of a tensor; the last one may be short."""
    return -(-numel // BLOCK)


def quantize_first(values: Tensor, book: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of ``exp_avg``, in 8 bits, or by one of `codebooks` in 4.

    Args:
        values: fp32, of shape (blocks, 128).
        book: values of the signed 4-bit codes; codes are then uint8 of shape (blocks, 64), else int8, (blocks, 128).
    """
    scaled, scales = _scaled(values)
    if book is not None:
        return _packed(scaled, book), scales
    codes = (254 * scaled / (1 + scaled.abs())).round().to(torch.int32)  # to int8 at once takes a CPU longer
    return codes.to(torch.int8), scales


def dequantize_first(codes: Tensor, scales: Tensor, book: Tensor | None = None) -> Tensor:
    """Return ``exp_avg``, fp32 of shape (blocks, 128)."""
    if book is not None:
        return _unpacked(codes, book) * scales[:, None]
    curve = codes.to(torch.float32) * (1 / 127)
    return curve / (2 - curve.abs()) * scales[:, None]


def quantize_second(values: Tensor, book: Tensor | None = None, uniform: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of ``exp_avg_sq``, in 8 bits, or by one of `codebooks` in 4.

    Args:
        values: fp32, of shape (blocks, 128), none negative.
        book: values of the unsigned 4-bit codes; codes are then of shape (blocks, 64), else (blocks, 128); uint8.
        uniform: in [0, 1), of the values' shape, for stochastic rounding to 8 bits; None: round to the nearest code.
    """
    scaled, scales = _scaled(values)
    if book is not None:
        return _packed(scaled, book), scales
    squares = scaled * 65025  # 255**2
    # not clamp, which looks for NaN: compiled for a CPU that takes longer
    squares = torch.where(squares < 65025, squares, 65025.0)
    below = squares.sqrt().floor()
    # the probability of the next code is the fraction of the way from this code's square to the next one's
    up = squares - below * below > (0.5 if uniform is None else uniform) * (2 * below + 1)
    codes = (below + up.to(torch.float32)).to(torch.int32)
    return torch.maximum(codes, (values > 0).to(torch.int32)).to(torch.uint8), scales


def dequantize_second(codes: Tensor, scales: Tensor, book: Tensor | None = None) -> Tensor:
    """Return ``exp_avg_sq``, fp32 of shape (blocks, 128)."""
    if book is not None:
        return _unpacked(codes, book) * scales[:, None]
    root = codes.to(torch.float32) * (1 / 255)
    return root * root * scales[:, None]


@functools.cache
def codebooks(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return torchao's values of the 4-bit codes: (for ``exp_avg``, for ``exp_avg_sq``).

    Raises:
        CapabilityError: torchao is not installed.
    """
    if not is_installed("torchao"):
        raise CapabilityError("moment_bits=4: the codes are torchao's; write pip install torchao, or moment_bits=8")
    from torchao.optim import subclass_4bit

    both = subclass_4bit.get_qmap_signed(), subclass_4bit.get_qmap_unsigned()
    first, second = (torch.tensor(values, dtype=torch.float32, device=device) for values in both)
    return first, second


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values scaled to [-1, 1], and each block's scale; infinite squares count as fp32's largest number."""
    scales = values.abs().amax(1).clamp_max(_MOST)
    return values * (1 / scales.clamp_min(_TINY))[:, None], scales


def _packed(scaled: Tensor, book: Tensor) -> Tensor:
    from torchao.optim.quant_utils import quantize_4bit_with_qmap

    codes: Tensor = quantize_4bit_with_qmap(scaled, book)
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def _unpacked(codes: Tensor, book: Tensor) -> Tensor:
    return book[torch.stack([codes >> 4, codes & 0b1111], dim=-1).flatten(1).int()]
