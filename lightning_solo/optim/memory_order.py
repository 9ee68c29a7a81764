"""Flat views of tensors in memory order, whatever the order of their dimensions, and chunks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from lightning_solo.memory.sharded_tensors import local

Thing = TypeVar("Thing")


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and tensor.numel():
            if stride != expected:
                return False
            expected *= size
    return True


def chunks(count: int, size: int) -> Iterator[slice]:
    """Yield the slices of ``size`` elements or rows each; the last one may be shorter.

    A plan traces only the first two (`planner.kernels`), so each chunk must free the memory that it allocates.
    """
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def buckets(things: Iterable[Thing], most: float, numel: Callable[[Thing], int]) -> Iterator[list[Thing]]:
    """Yield lists of small things that have at most ``most`` elements together; one of as many or more is alone."""
    bucket: list[Thing] = []
    total = 0
    for thing in things:
        count = numel(thing)
        if count >= most:
            yield [thing]
            continue
        if total + count > most:
            yield bucket
            bucket, total = [], 0
        bucket.append(thing)
        total += count
    if bucket:
        yield bucket


def in_memory_order(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a flat view of a dense tensor, or of this process's shard of it, in the order of its memory.

    Args:
        tensor: the tensor.
        like: the tensor whose order is used; a tensor of another order is copied into it.
    """
    tensor = local(tensor)
    like = tensor if like is None else local(like)
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
