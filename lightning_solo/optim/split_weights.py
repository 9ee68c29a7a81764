"""fp32 master weights in two parts: a bf16 weight for the module, and a correction.

The weight is the bf16 nearest to the fp32 number. The correction is their difference, in units of the lower bits: with
16 bits it restores the fp32 number bit for bit, with 8 bits its upper 24 bits. The two take 2 + 2 = 4 or 2 + 1 = 3
bytes per parameter; a bf16 weight with a separate fp32 master takes 2 + 4.

Ties between two bf16:

- With 32 bits they are rounded away from zero. If they were rounded to even, 65,537 fp32 numbers would share a bf16
  whose last bit is 0, and 16 bits distinguish only 65,536: the correction of a tie rounded down would be +32,768.
- With 24 bits they are rounded to even, as by ``master.to(torch.bfloat16)``. The correction is at most 127 units of
  2**-8, so that joined numbers are split the same way again. A number within half a unit of a tie is off by up to one
  unit.

Split as in FlashOptim (arXiv 2602.23349), section 3; stochastic rounding as in arXiv 2010.06192.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_solo.memory.sharded_tensors import local, part_of
from lightning_solo.optim import memory_order
from lightning_solo.optim.memory_order import in_memory_order

STOCHASTIC = "16-stochastic"
MASTER_BITS = (32, 24, STOCHASTIC)
CORRECTIONS = {32: torch.int16, 24: torch.int8}
"""Bits of the master weight -> type of the correction."""

CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Numbers that are split at a time, with some 24 bytes of temporaries each: few enough for the caches of a CPU, enough
to take a GPU longer than a launch."""

_QUIET_NAN = 0x7FC00000
_UPPER = -0x10000  # of 32 bits, the 16 that bf16 has


def split(master: Tensor, bits: int = 32) -> tuple[Tensor, Tensor]:
    """Return (bf16 weight, correction) of fp32 numbers, each of the same shape.

    Args:
        master: fp32, of any shape. NaN stays NaN; its payload is lost.
        bits: bits of the master to keep: 32 (correction int16) or 24 (int8).
    """
    raw = torch.where(master == master, master.view(torch.int32), _QUIET_NAN)
    if bits == 32:
        upper = (raw + 0x8000) & _UPPER
        return upper.view(torch.float32).to(torch.bfloat16), (raw - upper).to(torch.int16)
    # master.to(bfloat16) in integers, since torch.compile drops a conversion to bf16 and back
    upper = (raw + 0x7FFF + ((raw >> 16) & 1)) & _UPPER
    units = (raw - upper + 0x80) >> 8
    return upper.view(torch.float32).to(torch.bfloat16), units.clamp(-127, 127).to(torch.int8)


def bits_of(correction: Tensor) -> int:
    """Return the bits of a correction's master weight."""
    return 24 if correction.dtype == torch.int8 else 32


def join(weight: Tensor, correction: Tensor) -> Tensor:
    """Return the fp32 numbers that were split, or their upper 24 bits followed by zeros."""
    units = correction.to(torch.int32)
    units = torch.where(weight == 0, units.clamp_min(0), units)  # below a weight that was set to 0 the bits are NaN
    raw = weight.to(torch.float32).view(torch.int32) + (units << (32 - bits_of(correction)))
    return raw.view(torch.float32)


def round_stochastically(master: Tensor, uniform: Tensor) -> Tensor:
    """Round fp32 numbers to bf16, up or down at random, so that the mean is exact.

    Args:
        master: fp32, of any shape; NaN and infinities don't change.
        uniform: fp32 of the same shape, in [0, 1).
    """
    raw = master.view(torch.int32) + (uniform * 0x10000).to(torch.int32)
    rounded = (raw & _UPPER).view(torch.float32)
    return torch.where(master.isfinite(), rounded, master).to(torch.bfloat16)


def split_parameters(parameters: Iterable[Tensor], master_bits: int | str) -> dict[Tensor, Tensor]:
    """Make fp32 parameters bf16 in place, one by one, and return the correction of each, for `CompactAdamW`.

    At most one parameter exists in both types. With "16-stochastic" there are no corrections.

    Args:
        parameters: the parameters; those of other types don't change.
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
            corrections[p] = torch.empty(local(p).numel(), dtype=CORRECTIONS[master_bits], device=p.device)
            split_again(weight, p.detach(), corrections[p])
        p.data = weight
    return corrections


def join_parameters(parameters: Iterable[Tensor], corrections: Mapping[Tensor, Tensor]) -> None:
    """Make bf16 parameters fp32 again, in place, by the corrections that `split_parameters` returned."""
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
    """Set a bf16 parameter and its correction from an fp32 master weight of its shape, or a shard's from the whole."""
    master = part_of(master, p).to(p.device)
    flat, weight = in_memory_order(master, p.detach()), in_memory_order(p.detach())
    for part in memory_order.chunks(flat.numel(), CHUNK.get(p.device.type, CHUNK["cuda"])):
        upper, lower = split(flat[part], bits_of(correction))
        weight[part].copy_(upper)
        correction[part].copy_(lower)
