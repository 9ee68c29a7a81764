"""Objects that autograd stores instead of saved tensors."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from lightning_solo.errors import ConflictError


class Moved:
    """A saved storage that may be offloaded; saved tensors that are views of it keep it alive.

    Attributes:
        number: counts storages in the order of saving.
        whole: the storage on the device as a tensor of one dimension; None while it is only on the host.
        stored: its copy, a buffer on the host or a region of a file; None before the first copy.
        bytes, count: the storage's size, and its number of elements.
        source: a weak reference to the original storage.
        probe: a tensor without bytes whose version shows later changes of the saved tensor.
        version: the tensor's version when it was saved.
        copied: the event after its last copy.
    """

    def __init__(
        self, offloader: Any, number: int, whole: Tensor, source: weakref.ref[UntypedStorage], tensor: Tensor
    ) -> None:
        self.offloader, self.number, self.source = offloader, number, source
        self.stored: Any = None
        self.whole: Tensor | None = whole
        self.count, self.bytes = whole.numel(), whole.nbytes
        self.probe = tensor.detach()
        self.probe.data = tensor.new_empty(0)
        self.version = tensor._version
        self.copied: Any = None

    def __del__(self) -> None:
        self.offloader._release(self)


class View(NamedTuple):
    """A saved tensor whose storage may be offloaded; ``last`` is the number of the last storage saved by then."""

    moved: Moved
    last: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Left(NamedTuple):
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int


def require_unchanged(tensor: Tensor, version: int) -> None:
    """Check a saved tensor for changes in place, which torch doesn't do under saved-tensor hooks."""
    if tensor._version != version:
        raise ConflictError(
            f"a tensor saved for backward was changed in place afterwards, from version {version} to"
            f" {tensor._version}: its gradients would be wrong. Write x = x + y instead of x += y, relu(x) instead of"
            " relu_(x)"
        )
