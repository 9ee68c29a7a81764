"""The divergence of a student's logits from a teacher's, from its logits or from words drawn from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_solo.nn.deferred_logits import DeferredLogits

_ROWS = 1024
"""Rows of logits whose fp32 copies exist at a time."""


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0, counted: Tensor | None = None) -> Tensor:
    """Return ``temperature ** 2 * KL(teacher || student)`` of softmaxes of logits divided by the temperature, in fp32.

    It is the mean over the positions that count, and 0 where none does (Hinton et al. 2015, arXiv 1503.02531). Equal
    logits give exactly 0, and a gradient of exactly 0. Beside both logits there is one more tensor of their size, the
    gradient, which is computed in forward. Of `DeferredLogits` those of one chunk exist at a time, in backward again.

    Args:
        student: (..., vocabulary).
        teacher: (..., vocabulary), without a gradient.
        temperature: above 0.
        counted: (...), bool: the positions that count; None for all.

    >>> logits = torch.tensor([[0.5, 1.0, -2.0]])
    >>> float(divergence(logits, logits)), round(float(divergence(logits, torch.zeros(1, 3))), 4)
    (0.0, 0.5727)
    """
    weights = _weights(student, counted)

    def sum_of(logits: Tensor, at: slice) -> Tensor:
        return _Divergence.apply(logits, _rows(teacher, at), temperature, weights[at])  # type: ignore[no-any-return,no-untyped-call]

    return temperature**2 * _in_chunks(student, sum_of)


def divergence_from_draws(student: Tensor, drawn: Tensor, entropies: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return an unbiased estimate of `divergence` at temperature 1 from words that were drawn from the teacher.

    Top-k probabilities would be biased, and train worse than no teacher (arXiv 2503.16870).

    Args:
        student: (..., vocabulary).
        drawn: (..., draws): integers, drawn at random with the teacher's probabilities.
        entropies: (...): of the teacher's probabilities, in nats.
        counted: (...), bool: the positions that count; None for all.
    """
    weights = _weights(student, counted)
    drawn, entropies = drawn.flatten(0, -2).long(), entropies.flatten()

    def sum_of(logits: Tensor, at: slice) -> Tensor:
        exact = logits if logits.dtype is torch.float64 else logits.float()
        losses = exact.logsumexp(-1) - exact.gather(-1, drawn[at]).mean(-1) - entropies[at]
        return losses @ weights[at]

    return _in_chunks(student, sum_of)


def _in_chunks(student: Tensor, sum_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Return the sum of a function of logits and their positions; of deferred logits by chunks, again in backward."""
    if not isinstance(student, DeferredLogits):
        return sum_of(student.flatten(0, -2), slice(None))
    rows = student.numel() // student.shape[-1]
    chunks = [slice(start, start + student.chunk_tokens) for start in range(0, rows, student.chunk_tokens)]

    def chunk_sum(at: slice) -> Tensor:
        return sum_of(student.of_rows(at), at)

    return torch.stack(
        [checkpoint(chunk_sum, at, use_reentrant=False, preserve_rng_state=False) for at in chunks]
    ).sum()


def _rows(logits: Tensor, at: slice) -> Tensor:
    return logits.of_rows(at) if isinstance(logits, DeferredLogits) else logits.flatten(0, -2)[at]


def _weights(logits: Tensor, counted: Tensor | None) -> Tensor:
    """Return the share of each position in the mean."""
    rows = logits.numel() // max(logits.shape[-1], 1)
    exact = torch.float64 if logits.dtype is torch.float64 else torch.float32
    if counted is None:
        return torch.full((rows,), 1 / max(rows, 1), dtype=exact, device=logits.device)
    weights = counted.flatten().to(exact)
    return weights / weights.sum().clamp(min=1)


class _Divergence(torch.autograd.Function):
    """The sum of the rows' divergences by their weights."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        total = weights.new_zeros(())
        with torch.autocast(student.device.type, enabled=False):
            for start in range(0, len(student), _ROWS):
                at = slice(start, start + _ROWS)
                log_q = F.log_softmax(student[at].to(weights.dtype) / temperature, -1)
                log_p = F.log_softmax(teacher[at].to(weights.dtype) / temperature, -1)
                p = log_p.exp()
                # a word that the teacher rules out counts nothing, also where its logit is -inf
                losses = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
                total += losses @ weights[at]
                if gradient is not None:
                    gradient[at] = log_q.exp_().sub_(p).mul_((weights[at] / temperature).unsqueeze(1))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * factor.to(gradient.dtype), None, None, None
