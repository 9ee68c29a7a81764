"""Splitting a nested batch along its batch dimension."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from lightning_solo.data.nested import leaves, map_leaves, map_tensors, tensors_of
from lightning_solo.errors import ConflictError, nearest

BatchDim = int | Mapping[str, int | None]
"""The batch dimension of all tensors, or of each by its path: ``{"x": 1, "graph.mask": None}``; None: shared."""


_SPLIT = "split=f in Python, with f(batch, size) that returns a list of (part, its samples)"


def _dim_of(path: str, batch_dim: BatchDim) -> int | None:
    if not isinstance(batch_dim, Mapping):
        return batch_dim
    return next((dim for key, dim in batch_dim.items() if str(key) == path), 0)  # an index is a number in an override


def samples_of(batch: Any, batch_dim: BatchDim = 0) -> int:
    """Return the samples in a batch: the length of its tensors along the batch dimension.

    Tensors without dimensions, and those whose batch dimension is None, are shared by all samples.

    >>> samples_of({"x": torch.zeros(4, 3), "labels": torch.zeros(4), "temperature": torch.tensor(2.0)})
    4

    Raises:
        ConflictError: no tensor has a batch dimension, lengths differ, an object hides its tensors, or ``batch_dim``
            names a missing path; names them, and the remedy.
    """
    by_path = dict(leaves(batch))
    for path in batch_dim if isinstance(batch_dim, Mapping) else ():
        if str(path) not in by_path:
            raise ConflictError(
                f"callback.micro_batching.batch_dim: nothing in the batch has the path {str(path)!r}"
                f"{nearest(str(path), by_path)}there are {', '.join(by_path)}"
            )
    lengths: dict[int | None, dict[str, tuple[int, ...]]] = {}
    for path, leaf in by_path.items():
        dim, shape = _dim_of(path, batch_dim), _shape(leaf)
        if dim is None or shape == ():
            continue
        if shape is not None:
            length = shape[dim] if -len(shape) <= dim < len(shape) else None
            lengths.setdefault(length, {})[path] = shape
        elif next(tensors_of(leaf), None) is not None:
            raise ConflictError(
                f"micro-batches: a {type(leaf).__name__}{f' at {path}' if path else ''} can't be split; write {_SPLIT}"
            )
    if not lengths:
        raise ConflictError(
            f"micro-batches: a {type(batch).__name__} without a tensor that has a batch dimension can't be split; write"
            f" {_SPLIT}"
        )
    if len(lengths) > 1 or None in lengths:
        named = []
        for length, shapes in lengths.items():
            listed = ", ".join(f"{path or 'the batch'} {shape}" for path, shape in shapes.items())
            named.append(f"{'no such dimension' if length is None else length}: {listed}")
        dims = {path: _dim_of(path, batch_dim) for path in by_path}
        indices = {path for path, leaf in by_path.items() if isinstance(leaf, torch.Tensor) and not _is_real(leaf)}
        raise ConflictError(
            f"micro-batches: callback.micro_batching.batch_dim={_written(batch_dim)} has several lengths,"
            f" {'; '.join(named)}; write {' or '.join(_remedies(lengths, dims, indices))}"
        )
    return next(length for length in lengths if length is not None)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype is torch.bool


def _remedies(
    lengths: Mapping[int | None, Mapping[str, tuple[int, ...]]], dims: Mapping[str, int | None], indices: set[str]
) -> list[str]:
    """Return the settings that split a batch whose tensors have several lengths along ``dims``, most likely first.

    Tensors of integers, such as the edges of a graph, may be ``indices`` of rows, so that parts can't share them.
    """
    shapes = {path: shape for each in lengths.values() for path, shape in each.items()}
    dims = {path: dim for path, dim in dims.items() if dim is None or path in shapes}
    usual = sorted(lengths, key=lambda length: 0 if length is None else -len(lengths[length]))
    remedies = []
    for samples in (*usual, *(n for shape in shapes.values() for n in shape)):
        kept = lengths.get(samples, {})
        others = {path: shape.index(samples) for path, shape in shapes.items() if path not in kept and samples in shape}
        if samples is not None and kept.keys() | others.keys() == shapes.keys():  # each has a dimension of this length
            remedies.append(f"callback.micro_batching.batch_dim={_written({**dims, **others})}")
            break
    if len(lengths) > 1:
        shared = [path for path in shapes if path not in lengths[usual[0]]]
        written = _written({**dims, **dict.fromkeys(shared)})
        if indices.isdisjoint(shared):
            remedies.append(f"callback.micro_batching.batch_dim={written} to share {', '.join(shared)}")
    return [*remedies, _SPLIT]


def _written(batch_dim: BatchDim) -> str:
    """Return batch dimensions as an override's value; the first dimension is the default."""
    if not isinstance(batch_dim, Mapping):
        return str(batch_dim)
    parts = [f"{path}:{'null' if dim is None else dim}" for path, dim in batch_dim.items() if dim != 0]
    return f"{{{','.join(parts)}}}" if parts else "0"


def _shape(leaf: Any) -> tuple[int, ...] | None:
    shape = getattr(leaf, "shape", None)  # of tensors, and of NumPy's arrays
    return tuple(shape) if isinstance(shape, tuple) else None


def part_of(batch: Any, first: int, last: int, samples: int, batch_dim: BatchDim = 0) -> Any:
    """Return the samples of a batch at the indices ``first`` to ``last - 1``, as views in the same nesting.

    Lists and tuples as long as the batch, such as file names, are cut too, but not tuples of numbers, such as a size.

    >>> part_of([torch.arange(4), ["a", "b", "c", "d"], "train"], 1, 3, samples=4)
    [tensor([1, 2]), ['b', 'c'], 'train']
    """

    def cut(path: str, leaf: Any) -> Any:
        dim, shape = _dim_of(path, batch_dim), _shape(leaf)
        if dim is None or shape == ():
            return leaf
        if shape is not None:
            return leaf[(*(slice(None),) * (dim % len(shape)), slice(first, last))]
        is_size = isinstance(leaf, tuple) and all(isinstance(each, int | float) for each in leaf)
        return leaf[first:last] if isinstance(leaf, list | tuple) and len(leaf) == samples and not is_size else leaf

    return map_leaves(batch, cut)


def even_ranges(samples: int, max_samples: int) -> list[tuple[int, int]]:
    """Return the fewest ranges of at most ``max_samples`` each, whose lengths differ by at most one.

    >>> even_ranges(10, 4), even_ranges(8, 8)
    ([(0, 4), (4, 7), (7, 10)], [(0, 8)])
    """
    count = -(-samples // max_samples)
    length, longer = divmod(samples, count)
    ends = [index * length + min(index, longer) for index in range(count + 1)]
    return list(pairwise(ends))


def split_evenly(batch: Any, max_samples: int, batch_dim: BatchDim = 0) -> list[tuple[Any, int]]:
    """Return the parts of a batch, of at most ``max_samples`` each, with their numbers of samples.

    Raises:
        ConflictError: as `samples_of`.
    """
    samples = samples_of(batch, batch_dim)
    if samples <= max_samples:
        return [(batch, samples)]
    return [
        (part_of(batch, first, last, samples, batch_dim), last - first)
        for first, last in even_ranges(samples, max_samples)
    ]


def is_plain(batch: Any) -> bool:
    """Return whether a batch has only tensors, numbers, strings, lists, tuples and dicts, as checkpoints have."""
    if type(batch) is dict:
        return all(map(is_plain, batch)) and all(map(is_plain, batch.values()))
    if type(batch) in (list, tuple):
        return all(map(is_plain, batch))
    return type(batch) in (torch.Tensor, str, int, float, bool, type(None))


def moved(batch: Any, device: torch.device | str) -> Any:
    """Return a batch with its tensors copied to a device."""
    return map_tensors(batch, lambda tensor: tensor.to(device, copy=True))
