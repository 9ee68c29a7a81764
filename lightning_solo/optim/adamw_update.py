"""One step of AdamW or Adam on compact master weights and moments, chunk by chunk.

A chunk is unpacked to fp32, stepped with the operators of torch's own AdamW in their order, and packed again. So at
most one chunk exists in fp32. With fp32 weights and moments the result equals torch's AdamW bit for bit, or within
rounding if the step is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_solo.errors import PresetError
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.kernels import Scalars
from lightning_solo.optim.random_numbers import uniform
from lightning_solo.optim.split_weights import bits_of, join, round_stochastically, split

CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements of a chunk: few enough for the caches of a CPU, enough to occupy a GPU."""


@dataclass(frozen=True)
class Hyperparameters:
    """Hyper-parameters of one parameter's step, under the names of torch's AdamW and Adam."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyper-parameters of an optimizer's group."""
        return cls(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),  # tensors, of any dimensions, with `capturable`
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def require_valid(self, name: str) -> None:
        """Check the values; messages name the optimizer."""
        for key, value in (("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)):
            if (isinstance(value, Tensor) and value.numel() != 1) or not value >= 0:
                raise PresetError(f"{name}: {key}={value}: write a number of at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise PresetError(f"{name}: betas={self.betas}: write two numbers from 0 up to, not including, 1")

    def scalars(self, step: int) -> Scalars:
        """Return the coefficients of a step, counted from 1, without the seeds of a parameter."""
        beta1, beta2 = self.betas
        return Scalars(
            shrink=1 - self.lr * self.weight_decay if self.decoupled_weight_decay else 1.0,
            pull=0.0 if self.decoupled_weight_decay else self.weight_decay,
            first=1 - beta1,
            keep=beta2,
            second=1 - beta2,
            correction2=(1 - beta2**step) ** 0.5,
            eps=self.eps,
            rate=self.lr / (1 - beta1**step),
        )


@dataclass(frozen=True)
class Blocks:
    """Blocks of a parameter with their states, one row per block."""

    weight: Tensor  # (blocks, 128); the gradient and the correction have the same shape
    grad: Tensor  # the gradient
    exp_avg: Tensor  # (blocks, 128) in fp32 or 8 bits, (blocks, 64) in 4 bits
    exp_avg_sq: Tensor  # as ``exp_avg``
    correction: Tensor | None = None  # of a bf16 weight
    exp_avg_scale: Tensor | None = None  # (blocks,); None if the moments are in fp32
    exp_avg_sq_scale: Tensor | None = None  # as ``exp_avg_scale``
    book: Tensor | None = None  # values of the 4-bit codes of ``exp_avg``
    book_sq: Tensor | None = None  # values of the 4-bit codes of ``exp_avg_sq``


def update_blocks(
    blocks: Blocks, by: Scalars, *, first_row: int = 0, scale: float = 1.0, bound: float = math.inf
) -> None:
    """Step blocks of a parameter in place, by the operators of `torch.optim.adam._single_tensor_adam`, in order.

    Args:
        blocks: the blocks.
        by: the coefficients of the step.
        first_row: number of the first block in its parameter.
        scale: factor of the gradient.
        bound: the gradient is clamped to it before it is scaled.
    """
    weight, correction = blocks.weight, blocks.correction
    exp_avg_scale, exp_avg_sq_scale = blocks.exp_avg_scale, blocks.exp_avg_sq_scale
    rows, is_split = weight.shape[0], weight.dtype != torch.float32
    m, v = blocks.exp_avg, blocks.exp_avg_sq
    master = weight
    if is_split:
        master = weight.to(torch.float32) if correction is None else join(weight, correction)
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        m = moments.dequantize_first(m, exp_avg_scale, blocks.book)
        v = moments.dequantize_second(v, exp_avg_sq_scale, blocks.book_sq)
    grad = blocks.grad.to(torch.float32)
    if bound != math.inf:
        grad = grad.clamp(-bound, bound)
    grad = grad * scale
    master.mul_(by.shrink)
    if torch.compiler.is_compiling():  # a compiler takes weights of lerp_ and factors of addcmul_ for constants
        grad = grad + master * by.pull if by.pull else grad
        m.add_((grad - m) * by.first)
        v.mul_(by.keep).add_(grad * by.second * grad)
    else:
        if by.pull:
            grad = grad.add(master, alpha=by.pull)
        m.lerp_(grad, by.first)
        v.mul_(by.keep).addcmul_(grad, grad, value=by.second)
    root = v.sqrt().div_(by.correction2).add_(by.eps)
    master.add_((m * -by.rate).div_(root))  # addcdiv_, whose factor a compiler takes for a constant
    if is_split and correction is None:
        weight.copy_(round_stochastically(master, uniform(rows, BLOCK, first_row, by.seed_of_weights, weight.device)))
    elif is_split and correction is not None:
        for target, value in zip((weight, correction), split(master, bits_of(correction)), strict=True):
            target.copy_(value)
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        random = uniform(rows, BLOCK, first_row, by.seed, weight.device) if blocks.book_sq is None else None
        new = (*moments.quantize_first(m, blocks.book), *moments.quantize_second(v, blocks.book_sq, random))
        stored = (blocks.exp_avg, exp_avg_scale, blocks.exp_avg_sq, exp_avg_sq_scale)
        for target, value in zip(stored, new, strict=True):
            target.copy_(value)
