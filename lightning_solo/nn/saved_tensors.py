"""Objects that autograd holds instead of the tensors that it saved."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_solo.errors import ConflictError


class Moved:
    """A saved storage that may be offloaded; the saved tensors that are views of it keep it alive.

    Attributes:
        number: in the order of saving.
        whole: all of it on the device, in one dimension; None while it is on the host alone.
        stored: memory of its copy: a buffer on the host, or a place on a disk; None before the first copy.
        bytes, count: of it, elements.
        source: the storage that was saved.
        probe: shows later changes of the saved tensor by its version, and holds no bytes.
        version: of the tensor when it was saved.
        copied: the event after its last copy.
    """

    def __init__(
        self,
        offloader: Any,
        number: int,
        whole: Tensor,
        source: weakref.ref[UntypedStorage],
        tensor: Tensor,
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


@dataclass
class View:
    """A saved tensor whose storage is or may be offloaded."""

    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Left:
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


def require_unchanged(tensor: Tensor, version: int) -> None:
    """Check that a saved tensor is unchanged, which torch doesn't check for saved-tensor hooks.

    Raises:
        ConflictError: a saved tensor was changed in place since.
    """
    if tensor._version != version:
        raise ConflictError(
            f"a tensor saved for backward was changed in place afterwards, from version {version} to"
            f" {tensor._version}: its gradients would be wrong. Write x = x + y instead of x += y, relu(x) instead of"
            " relu_(x)"
        )
