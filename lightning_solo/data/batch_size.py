"""Samples and tokens of a batch, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_solo.data.nested import leaves, tensors_of


def size_of(batch: object) -> tuple[int | None, int | None]:
    """Return (samples, tokens) of a batch; tokens are None unless its first tensor has token ids, (batch, sequence).

    >>> size_of({"input_ids": torch.zeros(4, 128, dtype=torch.long)}), size_of([torch.zeros(4, 128)])
    ((4, 512), (4, None))
    """
    tensor = next((leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if tensor is None:
        return None, None
    integer = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    return tensor.shape[0], tensor.numel() if tensor.ndim == 2 and integer else None


def shapes_of(batch: object) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors in a batch, also those in attributes of objects.

    >>> shapes_of({"x": torch.zeros(2, 3), "label": [torch.zeros(2), "a"]})
    [(2, 3), (2,)]
    """
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def fits_into(shapes: Sequence[tuple[int, ...]], larger: Sequence[tuple[int, ...]]) -> bool:
    """Return whether each shape has as many dimensions as its counterpart in ``larger``, none of them longer.

    >>> fits_into([(2, 3)], [(2, 4)]), fits_into([(2, 3)], [(3, 2)]), fits_into([(2,)], [(2, 1)])
    (True, False, False)
    """
    return len(shapes) == len(larger) and all(
        len(one) == len(other) and all(a <= b for a, b in zip(one, other, strict=True))
        for one, other in zip(shapes, larger, strict=True)
    )
