"""The sequences of a nested batch, and batches with shorter sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_solo.data.nested import item_of, leaves, map_leaves
from lightning_solo.errors import ConflictError


def sequences_of(batch: Any) -> tuple[int, int]:
    """Return the number of sequences in a batch and their length, padding included.

    Sequences are integer tensors (batch, sequence), or if there are none, floating-point ones (batch, sequence, width).

    >>> sequences_of({"input_ids": torch.zeros(4, 128).long(), "labels": torch.zeros(4).long()})
    (4, 128)

    Raises:
        ConflictError: there are none, as in a batch of images or rows, or several lengths; names the shapes.
    """
    tokens: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, tuple[int, ...]] = {}
    others: dict[str, tuple[int, ...]] = {}

    for path, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            is_integer = not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype is not torch.bool
            kind = tokens if is_integer and leaf.ndim == 2 else others
            (numbers if leaf.is_floating_point() and leaf.ndim == 3 else kind)[path or "the batch"] = tuple(leaf.shape)
    sequences = tokens or numbers
    if not sequences:
        raise ConflictError(
            f"a {type(batch).__name__} of {_named(others) or 'no tensors'} has no sequences; give integers as"
            " (batch, sequence), or floating-point numbers as (batch, sequence, width)"
        )
    if len({shape[1] for shape in sequences.values()}) > 1:
        raise ConflictError(
            f"sequences of several lengths, {_named(sequences)}: it is unclear which to cut; cut them in the collate"
            " function"
        )
    return next(iter(sequences.values()))[:2]  # type: ignore[return-value]


def truncated(batch: Any, length: int, kept: int) -> Any:
    """Return a batch with the first ``kept`` places of its sequences, in the same nesting.

    Tensors that have the sequences' length after the batch dimension are cut: ids and masks in all such dimensions,
    floating-point tensors in the second one, or in the last two, as an additive mask. Other tensors are unchanged.
    The cut tensors are copies, so that a module may view them in another shape and the whole batch is freed.

    >>> x, y = truncated((torch.arange(8).view(2, 4), torch.zeros(2)), length=4, kept=2)
    >>> x.tolist(), tuple(y.shape)
    ([[0, 1], [4, 5]], (2,))

    Raises:
        ConflictError: it is unclear which dimension of a tensor is the sequence; names the tensor.
    """

    def cut(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dims = [dim for dim in range(1, leaf.ndim) if leaf.shape[dim] == length]
        if leaf.is_floating_point() and 1 in dims and len(dims) > 1:
            raise ConflictError(
                f"callback.curriculum.by=sequence_length: {path or 'the batch'} has the shape {tuple(leaf.shape)}, and"
                f" sequences have the length {length}: is it a mask or a sequence of vectors? write a mask as booleans"
                " or as (batch, 1, sequence, sequence)"
            )
        if leaf.is_floating_point() and 1 not in dims and dims[-2:] != [leaf.ndim - 2, leaf.ndim - 1]:
            dims = []
        for dim in dims:
            leaf = leaf.narrow(dim, 0, kept)
        return leaf.contiguous() if dims else leaf

    return map_leaves(batch, cut)


def is_left_padded(batch: Any) -> bool:
    """Return whether an ``attention_mask`` (batch, sequence) has a row that starts with 0 and isn't all 0.

    >>> is_left_padded({"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])})
    True
    """
    mask = item_of(batch, "attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    return bool((mask[:, 0].eq(0) & mask.ne(0).any(1)).any())


def _named(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {shape}" for path, shape in shapes.items())
