"""Samples and tokens of a batch, counted from its first tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def first_tensor(batch: object) -> torch.Tensor | None:
    """Return the first tensor with a batch dimension inside mappings and sequences, or None."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim else None
    items: Sequence[object] = ()
    if isinstance(batch, Mapping):
        items = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        items = batch
    return next((tensor for item in items if (tensor := first_tensor(item)) is not None), None)


def size_of(batch: object) -> tuple[int | None, int | None]:
    """Return the samples in a batch, and its tokens where its first tensor holds token ids as (batch, sequence).

    >>> size_of({"input_ids": torch.zeros(4, 128, dtype=torch.long)}), size_of([torch.zeros(4, 128)])
    ((4, 512), (4, None))
    """
    tensor = first_tensor(batch)
    if tensor is None:
        return None, None
    integer = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    return tensor.shape[0], tensor.numel() if tensor.ndim == 2 and integer else None
