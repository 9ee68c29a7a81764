"""The weight of a batch, or of part of one, in a mean over several: its samples, tokens, or the sum of a key."""

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
    """Return the item ``labels`` of a batch, or else the last item of a list or tuple if it holds integers."""
    named = item_of(batch, "labels")
    if isinstance(named, torch.Tensor):
        return named
    if isinstance(batch, Sequence) and len(batch) > 1:
        last = batch[-1]
        if isinstance(last, torch.Tensor) and not last.is_floating_point() and last.dtype is not torch.bool:
            return last
        return labels_of(last) if isinstance(last, Mapping) else None
    return None


def weight_of(batch: Any, samples: int, by: str) -> float:
    """Return the weight of a batch in a mean.

    Args:
        batch: or part of one.
        samples: in it.
        by: ``"samples"``; ``"tokens"``, the labels other than -100; ``"shifted_tokens"``, those that a model predicts
            which shifts labels itself: all but each row's first; or a key, whose values are summed.

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
                f"{by} are counted by their labels, and there is nothing called labels in this {type(batch).__name__};"
                " write samples in their place, or weight_by=the name of what has the weights"
            )
        return float((labels[..., 1:] if by == "shifted_tokens" else labels).ne(IGNORED).sum())
    values = item_of(batch, by)
    if not isinstance(values, torch.Tensor):
        names = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConflictError(
            f"weight_by={by!r}, and no tensor of that name is in the batch ({names}); write {', '.join(BY)}, or such a"
            " name"
        )
    if values.lt(0).any():
        raise ConflictError(
            f"weight_by={by!r}: {int(values.lt(0).sum())} values of this tensor are negative; write the name of weights"
            " of 0 or more, or weight_by=tokens to count labels"
        )
    return float(values.double().sum())
