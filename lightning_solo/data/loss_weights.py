"""Weights of batches in a mean over several batches: their samples, their tokens, or the sum of a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_solo.data.nested import item_of
from lightning_solo.errors import ConflictError

IGNORED = -100
"""The label that losses ignore, in torch and in transformers."""
BY = ("samples", "tokens", "shifted_tokens")


def labels_of(batch: Any) -> torch.Tensor | None:
    """Return a batch's item ``labels``, or the last item of a list or tuple if it holds integers; else None."""
    named = item_of(batch, "labels")
    if isinstance(named, torch.Tensor):
        return named
    if isinstance(batch, Sequence) and len(batch) > 1:
        last = batch[-1]
        if isinstance(last, torch.Tensor) and not last.is_floating_point() and last.dtype is not torch.bool:
            return last
        return labels_of(last) if isinstance(last, Mapping) else None
    return None


def weight_of(batch: Any, samples: int, by: str, option: str = "weight_by") -> float:
    """Return the weight of a batch in a mean.

    Args:
        batch: a batch, or part of one.
        samples: number of samples in the batch.
        by: ``"samples"``; ``"tokens"``, the labels other than -100; ``"shifted_tokens"``, the same without the first
            label of each row, for a model that shifts labels itself; or a key of the batch, whose values are summed.
        option: the user's option for ``by``, for messages.

    >>> weight_of({"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])}, 2, "tokens")
    3.0

    Raises:
        ConflictError: the batch has no labels, no tensor of that name, or negative weights.
    """
    if by == "samples":
        return float(samples)
    if by in BY:
        labels = labels_of(batch)
        if labels is None:
            raise ConflictError(
                f"{option}={by}: tokens are counted by their labels, and this {type(batch).__name__} has no labels;"
                f" write {option}=samples, or {option}=<the key of the weights in the batch>"
            )
        return float((labels[..., 1:] if by == "shifted_tokens" else labels).ne(IGNORED).sum())
    values = item_of(batch, by)
    if not isinstance(values, torch.Tensor):
        names = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConflictError(
            f"{option}={by!r}: the batch ({names}) has no tensor of this name; write"
            f" {', '.join(f'{option}={name}' for name in BY)}, or {option}=<the key of a tensor of weights>"
        )
    if values.lt(0).any():
        raise ConflictError(
            f"{option}={by!r}: {int(values.lt(0).sum())} values of this tensor are negative; write {option}=<the key of"
            f" weights of 0 or more>, or {option}=tokens to count labels"
        )
    return float(values.double().sum())
