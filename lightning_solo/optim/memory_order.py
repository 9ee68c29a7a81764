"""Tensors as flat views in the order of their memory, whatever the order of their dimensions; and parts of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its part of memory once each, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and tensor.numel():
            if stride != expected:
                return False
            expected *= size
    return True


def chunks(count: int, size: int) -> Iterator[slice]:
    """Yield the parts of so many elements or rows, each of ``size`` but for the last.

    A plan takes the first two for all (`planner.kernels`): what is allocated in one is freed in the next at the latest.
    """
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def in_memory_order(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a dense tensor as a flat one: a view of it, in the order of its memory.

    Args:
        tensor: whose view is wanted.
        like: the tensor whose order is wanted; a tensor of another order is copied into it.
    """
    like = tensor if like is None else like
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
