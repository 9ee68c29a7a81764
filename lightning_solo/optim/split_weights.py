"""fp32 master weights in two parts: a bf16 weight, with which the module computes, and a correction.

An fp32 number is cut below its 16 upper bits. The nearest bf16 is the weight; what that is off, counted in the units
of the lower bits, is the correction: 16 bits of it give the fp32 number back bit for bit, 8 bits give its upper 24.
2 + 2 = 4 bytes per parameter instead of 2 + 4 for a bf16 weight beside an fp32 master, or 2 + 1 = 3.

Which bf16 a tie goes to:

- 32 bits: away from zero. Rounded to even, 65,537 fp32 numbers would share a bf16 whose last bit is 0, and 16 bits
  tell only 65,536 apart: the correction of a tie that was rounded down would be +32,768.
- 24 bits: to even, as ``master.to(torch.bfloat16)`` does; the correction ends at +-127 units of 2**-8, so that what was
  split and joined is split the same way again. A number within half a unit of a tie is kept to within one unit.

Split as in FlashOptim (arXiv 2602.23349), section 3; stochastic rounding as in arXiv 2010.06192.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_solo.optim import memory_order
from lightning_solo.optim.memory_order import in_memory_order

STOCHASTIC = "16-stochastic"
MASTER_BITS = (32, 24, STOCHASTIC)
CORRECTIONS = {32: torch.int16, 24: torch.int8}
"""Bits of the master weight -> type of the correction."""

CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Numbers that are split at a time where all are in one tensor: what is computed on the way is some 24 bytes each. On a
CPU what its caches hold, on a GPU what takes longer than a launch."""

_QUIET_NAN = 0x7FC00000
_UPPER = -0x10000  # of 32 bits, the 16 that bf16 has


def split(master: Tensor, bits: int = 32) -> tuple[Tensor, Tensor]:
    """Return (bf16 weight, correction) of fp32 numbers, each of the same shape.

    Args:
        master: fp32, of any shape. A NaN stays one; its payload is not kept.
        bits: of the master that are kept: 32 (correction int16) or 24 (int8).
    """
    raw = torch.where(master == master, master.view(torch.int32), _QUIET_NAN)
    if bits == 32:
        upper = (raw + 0x8000) & _UPPER
        return upper.view(torch.float32).to(torch.bfloat16), (raw - upper).to(torch.int16)
    # master.to(bfloat16) in integers: compiled, torch takes a number that goes to bf16 and back for the number itself
    upper = (raw + 0x7FFF + ((raw >> 16) & 1)) & _UPPER
    units = (raw - upper + 0x80) >> 8
    return upper.view(torch.float32).to(torch.bfloat16), units.clamp(-127, 127).to(torch.int8)


def bits_of(correction: Tensor) -> int:
    """Return the bits of the master weight that a correction belongs to."""
    return 24 if correction.dtype == torch.int8 else 32


def join(weight: Tensor, correction: Tensor) -> Tensor:
    """Return the fp32 numbers that were split, or their upper 24 bits followed by zeros."""
    units = correction.to(torch.int32)
    units = torch.where(weight == 0, units.clamp_min(0), units)  # below a weight that was set to 0 the bits are NaN
    raw = weight.to(torch.float32).view(torch.int32) + (units << (32 - bits_of(correction)))
    return raw.view(torch.float32)


def round_stochastically(master: Tensor, uniform: Tensor) -> Tensor:
    """Round fp32 numbers to bf16, up or down with a probability by the distance, so that the mean is exact.

    Args:
        master: fp32, of any shape; NaN and infinities stay what they are.
        uniform: fp32 of the same shape, in [0, 1).
    """
    raw = master.view(torch.int32) + (uniform * 0x10000).to(torch.int32)
    rounded = (raw & _UPPER).view(torch.float32)
    return torch.where(master.isfinite(), rounded, master).to(torch.bfloat16)


def split_parameters(parameters: Iterable[Tensor], master_bits: int | str) -> dict[Tensor, Tensor]:
    """Make fp32 parameters bf16 in place, one by one, and return the correction of each, for `CompactAdamW`.

    Never more than one parameter exists in both types. With "16-stochastic" there are no corrections.

    Args:
        parameters: those of another type are left as they are.
        master_bits: 32, 24 or "16-stochastic".
    """
    corrections = {}
    for p in parameters:
        if p.dtype != torch.float32:
            continue
        weight = torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False)
        if isinstance(master_bits, str):
            weight.copy_(p.detach())
        else:
            corrections[p] = torch.empty(p.numel(), dtype=CORRECTIONS[master_bits], device=p.device)
            split_again(weight, p.detach(), corrections[p])
        p.data = weight
    return corrections


def join_parameters(parameters: Iterable[Tensor], corrections: Mapping[Tensor, Tensor]) -> None:
    """Make bf16 parameters fp32 again, in place, with what `split_parameters` returned for them."""
    for p in parameters:
        p.data = joined(p, corrections.get(p))


def joined(p: Tensor, correction: Tensor | None) -> Tensor:
    """Return a parameter's fp32 master weight, in its shape; for an fp32 parameter a view of itself."""
    if correction is None:
        return p.detach().to(torch.float32)
    master = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
    flat, weight, correction = in_memory_order(master), in_memory_order(p.detach()), correction.to(p.device)
    for part in memory_order.chunks(flat.numel(), CHUNK.get(p.device.type, CHUNK["cuda"])):
        flat[part] = join(weight[part], correction[part])
    return master


def split_again(p: Tensor, master: Tensor, correction: Tensor) -> None:
    """Set a bf16 parameter and its correction from an fp32 master weight of its shape."""
    flat, weight = in_memory_order(master.to(p.device), p.detach()), in_memory_order(p.detach())
    for part in memory_order.chunks(flat.numel(), CHUNK.get(p.device.type, CHUNK["cuda"])):
        upper, lower = split(flat[part], bits_of(correction))
        weight[part].copy_(upper)
        correction[part].copy_(lower)
