"""Samples and tokens of a batch, counted from its first tensor, and the shapes of all its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_solo.data.splitting import mapped_leaves


def first_tensor(batch: object) -> torch.Tensor | None:
    """Return the first tensor with a batch dimension in a nested batch, as `mapped_leaves` walks it, or None."""
    found: list[torch.Tensor] = []

    def note(_: str, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            found.append(leaf)
        return leaf

    mapped_leaves(batch, note)
    return found[0] if found else None


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


def tensors_of(batch: object) -> list[torch.Tensor]:
    """Return all tensors in a batch: in mappings, sequences and attributes of objects, such as graphs.

    >>> len(tensors_of({"x": torch.zeros(2, 3), "label": [torch.zeros(2), "a"]}))
    2
    """
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    ahead = [batch]
    while ahead:
        item = ahead.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif id(item) not in seen and not isinstance(item, str | bytes | type):
            seen.add(id(item))
            parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, Sequence) else ()
            slots = [getattr(item, name, None) for cls in type(item).__mro__ for name in _slots(cls)]
            ahead += reversed([*parts, *slots, *getattr(item, "__dict__", {}).values()])
    return tensors


def _slots(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def shapes_of(batch: object) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors in a batch, as `tensors_of` finds them.

    >>> shapes_of({"x": torch.zeros(2, 3), "label": [torch.zeros(2), "a"]})
    [(2, 3), (2,)]
    """
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def fits_into(shapes: Sequence[tuple[int, ...]], larger: Sequence[tuple[int, ...]]) -> bool:
    """Return whether each shape fits into its counterpart in ``larger``: equally many dimensions, none of them longer.

    >>> fits_into([(2, 3)], [(2, 4)]), fits_into([(2, 3)], [(3, 2)]), fits_into([(2,)], [(2, 1)])
    (True, False, False)
    """
    return len(shapes) == len(larger) and all(
        len(one) == len(other) and all(a <= b for a, b in zip(one, other, strict=True))
        for one, other in zip(shapes, larger, strict=True)
    )
