"""One step of AdamW or Adam of a parameter whose master weights and moments are kept compactly, chunk by chunk.

A chunk is unpacked to fp32, stepped with the operators of torch's own AdamW in their order, and packed again, so that
never more than one chunk exists in fp32. On fp32 weights and moments it is torch's AdamW, bit for bit; compiled, a few
loops read and write each number, within rounding of it.
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
from lightning_solo.optim.random_numbers import seed_of, uniform
from lightning_solo.optim.split_weights import bits_of, join, round_stochastically, split

CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements stepped at once: on the CPU what its caches hold, on a GPU what fills it."""


@dataclass(frozen=True)
class Hyperparameters:
    """Of one parameter's step, as torch's AdamW and Adam name them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> Hyperparameters:
        """Return those of an optimizer's group."""
        return cls(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def require_valid(self, name: str) -> None:
        """Check the numbers that an optimizer, of this name, was given.

        Raises:
            PresetError: one is out of its range.
        """
        for key, value in (("lr", float(self.lr)), ("eps", self.eps), ("weight_decay", self.weight_decay)):
            if not value >= 0:
                raise PresetError(f"{name}: {key}={value}: write a number of at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise PresetError(f"{name}: betas={self.betas}: write two numbers from 0 up to, not including, 1")

    def scalars(self, step: int, index: int) -> Scalars:
        """Return the numbers of a parameter's step.

        Args:
            step: which step of the parameter it is, from 1 on.
            index: of the parameter among those of its optimizer; random numbers depend on it and on the step.
        """
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
            seed=seed_of(step, index),
            seed_of_weights=seed_of(step, index, purpose=1),
        )


def update_blocks(
    *,
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    correction: Tensor | None = None,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    book: Tensor | None = None,
    book_sq: Tensor | None = None,
    first_row: int,
    scale: float,
    shrink: float,
    pull: float,
    first: float,
    keep: float,
    second: float,
    correction2: float,
    eps: float,
    rate: float,
    seed: int,
    seed_of_weights: int,
    bound: float = math.inf,
) -> None:
    """Step blocks of a parameter in place: the operators of `torch.optim.adam._single_tensor_adam`, in their order.

    Args:
        weight: (blocks, 128); so are the gradient, the correction, and moments in fp32 or 8 bits.
        grad: as the weight.
        exp_avg: (blocks, 64) in 4 bits.
        exp_avg_sq: as ``exp_avg``.
        correction: of a bf16 weight.
        exp_avg_scale: (blocks,).
        exp_avg_sq_scale: (blocks,).
        book: values of the codes of ``exp_avg`` in 4 bits.
        book_sq: values of the codes of ``exp_avg_sq`` in 4 bits.
        first_row: which block of the parameter is the first.
        scale: factor of the gradient.
        shrink: 1 - lr * weight decay, of AdamW.
        pull: weight decay of Adam, which adds it to the gradient.
        first: 1 - beta1.
        keep: beta2.
        second: 1 - beta2.
        correction2: root of AdamW's second bias correction.
        eps: of AdamW.
        rate: lr over the first bias correction.
        seed: of the second moment's rounding.
        seed_of_weights: of the weights' rounding, where they have no correction.
        bound: the gradient is clamped to it, before it is scaled.
    """
    rows, is_split = weight.shape[0], weight.dtype != torch.float32
    m, v = exp_avg, exp_avg_sq
    master = weight
    if is_split:
        master = weight.to(torch.float32) if correction is None else join(weight, correction)
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        m = moments.dequantize_first(exp_avg, exp_avg_scale, book)
        v = moments.dequantize_second(exp_avg_sq, exp_avg_sq_scale, book_sq)
    grad = grad.to(torch.float32)
    if bound != math.inf:
        grad = grad.clamp(-bound, bound)
    grad = grad * scale
    master.mul_(shrink)
    if torch.compiler.is_compiling():  # weights of lerp_ and factors of addcmul_ it would take for constants
        grad = grad + master * pull if pull else grad
        m.add_((grad - m) * first)
        v.mul_(keep).add_(grad * second * grad)
    else:
        if pull:
            grad = grad.add(master, alpha=pull)
        m.lerp_(grad, first)
        v.mul_(keep).addcmul_(grad, grad, value=second)
    root = v.sqrt().div_(correction2).add_(eps)
    master.add_((m * -rate).div_(root))  # addcdiv_, whose factor a compiler takes for a constant
    if is_split and correction is None:
        weight.copy_(round_stochastically(master, uniform(rows, BLOCK, first_row, seed_of_weights, weight.device)))
    elif is_split and correction is not None:
        for stored, made in zip((weight, correction), split(master, bits_of(correction)), strict=True):
            stored.copy_(made)
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        random = uniform(rows, BLOCK, first_row, seed, weight.device) if book_sq is None else None
        new = (*moments.quantize_first(m, book), *moments.quantize_second(v, book_sq, random))
        for stored, made in zip((exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale), new, strict=True):
            stored.copy_(made)
