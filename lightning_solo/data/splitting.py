"""Splitting a nested batch along its batch dimension."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from lightning_solo.errors import ConflictError, nearest

BatchDim = int | Mapping[str, int | None]
"""The batch dimension of all tensors, or by path, such as ``{"x": 1, "graph.mask": None}``; None: shared."""


def mapped_leaves(thing: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return the same nesting with each leaf replaced by ``function(path, leaf)``.

    It descends into mappings (including a tokenizer's ``BatchEncoding``), lists, tuples, named tuples and dataclasses.
    Leaves are tensors, lists without any tensor, such as file names, and all other values.
    """

    def at(name: object, value: Any) -> Any:
        return mapped_leaves(value, function, f"{path}.{name}" if path else str(name))

    if isinstance(thing, torch.Tensor):
        return function(path, thing)
    if isinstance(thing, Mapping):
        return _mapping_like(thing, {key: at(key, value) for key, value in thing.items()})
    if isinstance(thing, list | tuple):
        if not _has_tensors(thing):
            return function(path, thing)
        parts = [at(index, value) for index, value in enumerate(thing)]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        like = copy.copy(thing)
        for field in dataclasses.fields(thing):
            object.__setattr__(like, field.name, at(field.name, getattr(thing, field.name)))
        return like
    return function(path, thing)


def _mapping_like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(mapping, dict | UserDict):  # their shallow copies have their own items
        like: Any = copy.copy(mapping)
        for key, value in items.items():
            like[key] = value
        return like
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:  # its constructor takes other arguments
        return items


def _has_tensors(thing: Any) -> bool:
    """Return whether there are tensors in a value or in attributes of its objects; cycles are allowed."""
    seen: set[int] = set()
    ahead = [thing]
    while ahead:
        part = ahead.pop()
        if isinstance(part, torch.Tensor):
            return True
        if id(part) in seen or isinstance(part, str | bytes | int | float | None):
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            ahead += part.values()
        elif isinstance(part, list | tuple):
            ahead += part
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            ahead += [getattr(part, field.name) for field in dataclasses.fields(part)]
        elif hasattr(part, "__dict__") and not callable(part):
            ahead += vars(part).values()
    return False


def _dim_of(path: str, batch_dim: BatchDim) -> int | None:
    return batch_dim.get(path, 0) if isinstance(batch_dim, Mapping) else batch_dim


def samples_of(batch: Any, batch_dim: BatchDim = 0) -> int:
    """Return the samples in a batch: the length of its tensors along the batch dimension.

    All samples share tensors without dimensions and those whose batch dimension is None.

    >>> samples_of({"x": torch.zeros(4, 3), "labels": torch.zeros(4), "temperature": torch.tensor(2.0)})
    4

    Raises:
        ConflictError: no tensor has a batch dimension, their lengths differ, an object hides its tensors, or
            ``batch_dim`` names a missing path; names them, and what to write.
    """
    lengths: dict[int, list[str]] = {}
    seen: list[str] = []

    def see(path: str, leaf: Any) -> Any:
        seen.append(path)
        dim, shape = _dim_of(path, batch_dim), _shape(leaf)
        if dim is None or shape == ():
            return leaf
        if shape is None:
            if not isinstance(leaf, list | tuple) and _has_tensors(leaf):
                raise ConflictError(
                    f"can't split a {type(leaf).__name__}{f' at {path}' if path else ''}: write"
                    " split=a function of (batch, size) that returns a list of (part, its samples)"
                )
            return leaf
        if not -len(shape) <= dim < len(shape):
            raise ConflictError(f"batch_dim={dim}, and {path or 'the batch'} has the shape {shape}; {_remedy(path)}")
        lengths.setdefault(shape[dim], []).append(f"{path or 'the batch'} {shape}")
        return leaf

    mapped_leaves(batch, see)
    for path in batch_dim if isinstance(batch_dim, Mapping) else ():
        if path not in seen:
            raise ConflictError(
                f"batch_dim: nothing in the batch has the path {path!r}{nearest(path, seen)}there are {', '.join(seen)}"
            )
    if not lengths:
        raise ConflictError(
            f"can't split a {type(batch).__name__}: it has no tensor with a batch dimension; write"
            " split=a function of (batch, size) that returns a list of (part, its samples)"
        )
    if len(lengths) > 1:
        named = "; ".join(f"{length}: {', '.join(paths)}" for length, paths in lengths.items())
        rarest = min(lengths.values(), key=len)[0].partition(" ")[0]
        raise ConflictError(f"the batch dimension has several lengths, {named}; {_remedy(rarest)}")
    return next(iter(lengths))


def _remedy(path: str) -> str:
    return (
        f"write batch_dim={{{path or 'x'}: 1}} for another dimension, batch_dim={{{path or 'x'}: null}} for what all"
        " samples share, or split=a function of (batch, size)"
    )


def _shape(leaf: Any) -> tuple[int, ...] | None:
    shape = getattr(leaf, "shape", None)  # of tensors, and of NumPy's arrays
    return tuple(shape) if isinstance(shape, tuple) else None


def part_of(batch: Any, first: int, last: int, samples: int, batch_dim: BatchDim = 0) -> Any:
    """Return samples ``first`` to ``last`` of a batch of ``samples``: views, in the same nesting.

    Lists as long as the batch, such as file names, are cut too, and tuples that are not numbers, such as a size.

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

    return mapped_leaves(batch, cut)


def even_ranges(samples: int, max_samples: int) -> list[tuple[int, int]]:
    """Return the fewest ranges of at most ``max_samples`` each; their lengths differ by at most one.

    >>> even_ranges(10, 4), even_ranges(8, 8)
    ([(0, 4), (4, 7), (7, 10)], [(0, 8)])
    """
    count = -(-samples // max_samples)
    length, longer = divmod(samples, count)
    ends = [index * length + min(index, longer) for index in range(count + 1)]
    return list(pairwise(ends))


def split_evenly(batch: Any, max_samples: int, batch_dim: BatchDim = 0) -> list[tuple[Any, int]]:
    """Return a batch in parts of at most ``max_samples``, each with its number of samples.

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
    """Return whether a batch consists of tensors, numbers, strings, lists, tuples and dicts, as checkpoints do."""
    if type(batch) is dict:
        return all(map(is_plain, batch)) and all(map(is_plain, batch.values()))
    if type(batch) in (list, tuple):
        return all(map(is_plain, batch))
    return type(batch) in (torch.Tensor, str, int, float, bool, type(None))


def moved(batch: Any, device: torch.device | str) -> Any:
    """Return a batch with its tensors copied to a device."""
    return mapped_leaves(batch, lambda _, leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf)
