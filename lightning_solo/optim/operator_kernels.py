"""Steps of compact states and sums of gradients by torch's operators, on any device, or in C++ on a CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_solo.errors import CapabilityError
from lightning_solo.machine import is_installed, open_to_others
from lightning_solo.optim import adamw_update, cpu_kernel, memory_order
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.adamw_update import Blocks, update_blocks
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.kernels import Control, Piece, Sum

FUSED_FROM = 2**24
"""Elements of all parameters from which the seconds that torch.compile takes are worth it."""

JOINED = 2**15
"""Elements of the parameters that one step by operators takes together; torch doesn't divide them between threads."""

Update = Callable[..., None]


class OperatorKernels:
    """Steps chunk by chunk, so that at most one chunk exists in fp32.

    Args:
        device: of the tensors.
        fused: whether torch.compile compiles the step of a chunk. None: from 16 million elements on, where there is a
            compiler.
        numel: elements of all parameters.
    """

    grouped_below = 2**16  # a call takes a CPU as long as stepping as many elements: some 50 microseconds
    grouped_bytes = 2**20
    folds = False

    def __init__(self, device: torch.device, *, fused: bool | None = None, numel: int = 0) -> None:
        self._device, self._fused, self._numel = device, fused, numel

    @property
    def piece(self) -> int:
        """Elements of a chunk."""
        return adamw_update.CHUNK.get(self._device.type, adamw_update.CHUNK["cuda"])

    def reads_host(self, piece: Piece) -> bool:
        """Return False: host tensors must be copied to the device."""
        return False

    def partials_of(self, numel: int) -> int:
        """Return 1: one norm for the whole tensor."""
        return 1

    def step(self, pieces: Sequence[Piece], control: Control) -> None:
        """Step pieces one after the other, small ones together; waits for the scale once for each ``control``."""
        if math.isnan(control.scale_on_host):
            return
        alike: dict[Any, list[Piece]] = {}
        for piece in pieces:
            if self._joins(piece):
                alike.setdefault(piece.scalars.coefficients, []).append(piece)
            else:
                self._step_one(piece, control)
        for small in alike.values():
            for bucket in memory_order.buckets(small, JOINED, lambda piece: piece.numel):
                self._step_joined(bucket, control) if len(bucket) > 1 else self._step_one(bucket[0], control)

    def _joins(self, piece: Piece) -> bool:
        """Return whether a piece is stepped together with others: a small one whose step draws no random numbers."""
        if piece.numel >= JOINED or "exp_avg_scale" in piece.tensors:
            return False
        draws = piece.tensors["weight"].dtype != torch.float32 and "correction" not in piece.tensors
        return not draws and (piece.numel < moments.LEAST or self._update() is update_blocks)

    def _step_joined(self, pieces: Sequence[Piece], control: Control) -> None:
        """Step copies of several pieces as one, and copy the results back."""
        sizes = [piece.numel for piece in pieces]
        rest = -sum(sizes) % BLOCK
        joined = {}
        for name, first in pieces[0].tensors.items():
            parts = [piece.tensors[name] for piece in pieces]
            joined[name] = torch.cat([*parts, first.new_zeros(rest)]).view(-1, BLOCK)
        update_blocks(Blocks(**joined), pieces[0].scalars, scale=control.scale_on_host, bound=control.bound)
        for name, rows in joined.items():
            if name != "grad":
                *stepped, _ = torch.split(rows.view(-1), [*sizes, rest])
                torch._foreach_copy_([piece.tensors[name] for piece in pieces], stepped)

    def add(self, sums: Sequence[Sum], control: Control) -> None:
        """Add gradients, and measure the sums in a second pass."""
        for each in sums:
            total = each.gradient if each.total is None else each.total
            if each.total is not None:
                total.copy_(each.gradient) if each.is_first else total.add_(each.gradient)
            if each.partials is not None:
                each.partials[0] = norm(total, control.bound)

    def _step_one(self, piece: Piece, control: Control) -> None:
        numbers = {"scale": control.scale_on_host, "bound": control.bound}
        four_bits = moments.BITS[piece.tensors["exp_avg"].dtype] == 4
        books = dict(zip(("book", "book_sq"), moments.codebooks(self._device), strict=True)) if four_bits else {}

        def step(part: Piece, update: Update) -> None:
            widths = {name: part.width(name) for name in part.tensors}
            rows = {name: x.view(-1, widths[name]) if widths[name] > 1 else x for name, x in part.tensors.items()}
            update(Blocks(**rows, **books), part.scalars, first_row=part.first_row, **numbers)

        whole, size = piece.numel // BLOCK, self.piece // BLOCK
        update = self._update() if piece.numel >= moments.LEAST else update_blocks  # each kind is compiled separately
        for rows in memory_order.chunks(whole, size):
            part = piece.blocks(rows.start, rows.stop)
            step(part, update_blocks if part.numel == BLOCK else update)  # 1 would be compiled separately
        if piece.numel % BLOCK:
            rest = piece.blocks(whole, whole + 1)
            zero = {"exp_avg": 0x77} if four_bits else {}  # two codes of 0, where 0x00 is twice the least number
            padded = {
                name: F.pad(value, (0, rest.width(name) - value.numel()), value=zero.get(name, 0))
                for name, value in rest.tensors.items()
            }
            step(replace(rest, tensors=padded), update_blocks)
            for name, value in rest.tensors.items():
                if name != "grad":
                    value.copy_(padded[name][: value.numel()])

    def _update(self) -> Update:
        wanted = self._fused
        if wanted is None:
            wanted = self._numel >= FUSED_FROM and can_compile(self._device)
        return _compiled() if wanted else update_blocks


class CpuKernels(OperatorKernels):
    """Steps parameters with 8-bit moments in C++, in one pass over memory, and other parameters by operators."""

    def reads_host(self, piece: Piece) -> bool:
        """Return whether the step is in C++, which reads host memory directly."""
        return self._kernel(piece) is not None

    def _step_one(self, piece: Piece, control: Control) -> None:
        kernel = self._kernel(piece)
        if kernel is None:
            super()._step_one(piece, control)
            return
        kernel(piece, control)

    def _kernel(self, piece: Piece) -> cpu_kernel.Kernel | None:
        if self._fused is False or not cpu_kernel.serves(piece):
            return None
        return cpu_kernel.kernel()


def norm(tensor: Tensor, bound: float = math.inf) -> Tensor:
    """Return the norm of a tensor's elements clamped to a bound, in fp32 or wider; non-finite if an element is."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if not tensor.numel():
        return torch.zeros((), dtype=wide, device=tensor.device)
    if bound == math.inf:
        unbounded: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
        return unbounded
    bounded = tensor.clamp(-bound, bound) if tensor.dtype == wide else tensor.to(wide).clamp_(-bound, bound)
    total: Tensor = torch.linalg.vector_norm(bounded)
    return total + greatest([tensor])[0].to(wide) * 0  # not finite if an element wasn't finite before clamping


def greatest(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each non-empty gradient; it is finite only if all elements are."""
    others = [g for g in gradients if not is_on_cpu(g)]
    # on a CPU the norm takes thirty times as long; on a GPU it is one kernel for all, aminmax is one for each
    norms = iter(torch._foreach_norm(others, math.inf) if others else ())
    return [torch.stack(real_parts(g).aminmax()).abs().amax() if is_on_cpu(g) else next(norms) for g in gradients]


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether a CPU's operators compute with a tensor; plans of a GPU replace this."""
    return tensor.device.type == "cpu"


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of non-empty gradients are finite, as a tensor; doesn't wait for a device."""
    if not is_on_cpu(gradients[0]):
        return torch.stack([worst.float() for worst in greatest(gradients)]).isfinite().all()
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in map(real_parts, gradients):
        by_type.setdefault(gradient.dtype, []).append(gradient)
    worst: list[Tensor] = []
    for alike in by_type.values():  # small ones are copied into one, since each call takes longer than its copy
        for bucket in memory_order.buckets(alike, JOINED, Tensor.numel):
            worst += bucket[0].aminmax() if len(bucket) == 1 else torch.cat([g.reshape(-1) for g in bucket]).aminmax()
    return torch.stack([value.float() for value in worst]).isfinite().all()


def real_parts(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile can compile for a device here: by Triton on a GPU, by C++ on a CPU."""
    return is_installed("triton") if device.type == "cuda" else cpu_kernel.kernel() is not None


@functools.cache
def _compiled() -> Update:
    if reason := open_to_others("TORCHINDUCTOR_CACHE_DIR"):
        raise CapabilityError(f"compact states are compiled by torch.compile: {reason}")
    compiled = torch.compile(update_blocks, dynamic=True, fullgraph=True)

    def update(*arguments: Any, **numbers: Any) -> None:
        # one for each kind of weight, gradient and state in this process; torch fails beyond 8
        with torch._dynamo.config.patch(recompile_limit=64):
            compiled(*arguments, **numbers)

    return update
