"""Tensors as flat views in the order of their memory, whatever the order of their dimensions."""

from __future__ import annotations

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
