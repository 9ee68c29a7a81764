"""Interface of the kernels of `CompactAdamW` and `StepInBackward`: steps of many parameters, sums of gradients.

`operator_kernels` implements it by torch's operators on any device, and in C++ on a CPU. `gpu_kernel` implements it by
Triton, with one launch for all pieces of a call. No call on a GPU waits for the device: the decision whether a step is
taken (`Control.scale`) and the measurements (`Control.not_finite`, `Sum.partials`) are tensors on the device.
`kernels_on` chooses an implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_solo.optim.compressed_moments import BITS, BLOCK, blocks
from lightning_solo.optim.random_numbers import seed_of

PER_PARTIAL = 2**14
"""Elements of a gradient whose squares make one partial sum."""


class Scalars(NamedTuple):
    """The coefficients of one parameter's step."""

    shrink: float  # 1 - lr * weight decay, of AdamW
    pull: float  # weight decay of Adam, which adds it to the gradient
    first: float  # 1 - beta1
    keep: float  # beta2
    second: float  # 1 - beta2
    correction2: float  # root of AdamW's second bias correction
    eps: float  # of AdamW
    rate: float  # lr over the first bias correction
    seed: int = 0  # of the second moment's rounding
    seed_of_weights: int = 0  # of the weights' rounding, where they have no correction

    @property
    def coefficients(self) -> tuple[float, ...]:
        """All but the seeds: what parameters of a group at the same step have in common."""
        return self[:-2]

    def seeded(self, step: int, index: int) -> Scalars:
        """Return the scalars with the seeds of a parameter, by its step and its number in the optimizer."""
        return self._replace(seed=seed_of(step, index), seed_of_weights=seed_of(step, index, purpose=1))


@dataclass(frozen=True)
class Piece:
    """A parameter, or some of its blocks of 128, for one step.

    Attributes:
        tensors: flat, on the device: ``weight``, ``grad``, ``exp_avg``, ``exp_avg_sq``, and ``correction``,
            ``exp_avg_scale`` and ``exp_avg_sq_scale`` where the parameter has them. The number of elements is a
            multiple of 128, except at the end of the parameter.
        scalars: of the step.
        first_row: which block of the parameter is the piece's first.
        index: of the parameter's entry in ``Control.not_finite``.
    """

    tensors: Mapping[str, Tensor]
    scalars: Scalars
    first_row: int = 0
    index: int = 0

    @cached_property
    def layout(self) -> tuple[tuple[str, torch.dtype], ...]:
        """Names and types of the tensors: pieces of one layout share a launch."""
        return tuple((name, self.tensors[name].dtype) for name in sorted(self.tensors))

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.tensors["weight"].numel()

    def width(self, name: str) -> int:
        """Return how many entries of a tensor belong to a block: 1 for scales, 64 for 4-bit codes."""
        if name.endswith("_scale"):
            return 1
        return BLOCK // 2 if name.startswith("exp_avg") and BITS[self.tensors["exp_avg"].dtype] == 4 else BLOCK

    def blocks(self, first: int, last: int) -> Piece:
        """Return some of the piece's blocks as views of its tensors; the last block may be short."""
        parts = {name: x[first * self.width(name) : last * self.width(name)] for name, x in self.tensors.items()}
        return Piece(parts, self.scalars, self.first_row + first, self.index)

    def split(self, count: int) -> list[Piece]:
        """Return the piece in parts of ``count`` blocks, as views of its tensors; the last part may be short."""
        if self.numel <= count * BLOCK:
            return [self]
        return [self.blocks(first, first + count) for first in range(0, blocks(self.numel), count)]


@dataclass(frozen=True)
class Sum:
    """A gradient that is added to a total, and the norms of the sum.

    Attributes:
        gradient: flat, on the device.
        total: flat, of as many elements; the gradient is added to it. None: the gradient is only measured.
        is_first: whether the gradient overwrites the total instead.
        partials: of `Kernels.partials_of` elements, fp32 or wider. Each becomes the norm of a part of the total,
            clamped to ``Control.bound``; it isn't finite if an element wasn't finite before clamping. The norm of the
            total is the norm of the partials. None: nothing is measured.
    """

    gradient: Tensor
    total: Tensor | None = None
    is_first: bool = False
    partials: Tensor | None = None


@dataclass
class Control:
    """The values that the kernels of a step share on the device."""

    scale: Tensor  # factor of every gradient, fp32 of no dimensions. NaN: nothing is stepped.
    not_finite: Tensor  # int32, per parameter; becomes 1 where a stepped gradient had an element that isn't finite
    bound: float = math.inf  # gradients are clamped to it before they are scaled

    @cached_property
    def scale_on_host(self) -> float:
        """The scale as a number, for which the host waits once."""
        return float(self.scale)


class Kernels(Protocol):
    """The step of compact states and the sums of gradients, on one device."""

    grouped_below: int
    """Elements below which a parameter waits for others, to be stepped in one call with them; 0: none."""
    grouped_bytes: int
    """Bytes of their gradients from which they wait no longer."""
    folds: bool
    """Whether a step sets ``Control.not_finite``, and partials take no second pass over a gradient."""

    @property
    def piece(self) -> int:
        """Elements that are copied from the host at once, a multiple of 128."""

    def reads_host(self, piece: Piece) -> bool:
        """Return whether a piece with some tensors on the host is stepped without copying them."""

    def partials_of(self, numel: int) -> int:
        """Return how many partial norms ``numel`` elements have."""

    def step(self, pieces: Sequence[Piece], control: Control) -> None:
        """Step pieces, all of one layout, in place."""

    def add(self, sums: Sequence[Sum], control: Control) -> None:
        """Add gradients of one type to totals of one type, and measure the sums."""


def kernels_on(device: torch.device, *, fused: bool | None = None, numel: int = 0) -> Kernels:
    """Return the kernels for a device."""
    from lightning_solo.optim.operator_kernels import CpuKernels, OperatorKernels

    operators = (CpuKernels if device.type == "cpu" else OperatorKernels)(device, fused=fused, numel=numel)
    if fused is False or device.type != "cuda":
        return operators
    from lightning_solo.optim import gpu_kernel

    return gpu_kernel.kernels(device, otherwise=operators) or operators
