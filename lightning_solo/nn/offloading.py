"""Tensors that autograd saves for backward, kept in host memory in between, by copies on a stream of their own."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_solo.errors import ConflictError
from lightning_solo.memory import host_slabs

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # other classes hold their numbers in tensors of their own
_REMEDY = "take smaller micro-batches or shorter sequences"


class Offloader:
    """Copies what autograd saves to the host, frees it on the device, and brings it back ahead of backward.

    A storage is moved once, however many tensors of it are saved. Weights, buffers, their views and small storages stay
    where they are. On the way to the host are at most ``in_flight`` times the bytes of the largest storage, and as many
    come back ahead of the tensor that backward is at. On a GPU all copies are on one stream, in both directions, so
    that a copy from a host buffer is done when the next one into it begins. On a CPU the same copies go into a second
    buffer, without streams.

    What is saved belongs to the graph: it is freed with it, whether backward runs, runs twice, or fails.

    Args:
        device: on which the tensors are.
        min_bytes: of the smallest storage that is moved.
        in_flight: as above.

    Attributes:
        moved_bytes: all that was copied to the host.
        host_bytes: of the buffers on the host, which are used again in every micro-batch.
        largest_left_bytes: of the largest storage that stayed for being small.

    >>> offloader = Offloader(torch.device("cpu"), min_bytes=16)
    >>> x = torch.ones(8, requires_grad=True)
    >>> with offloader.saving():
    ...     loss = x.exp().sum()
    >>> loss.backward()
    >>> offloader.moved_bytes, offloader.host_bytes
    (32, 32)
    """

    def __init__(self, device: torch.device, min_bytes: int = 2**20, in_flight: int = 1) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self.in_flight = in_flight
        self.moved_bytes = self.host_bytes = self.largest_left_bytes = 0
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._weights: set[int] = set()
        self._moved: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()  # by number
        self._of_storage: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()
        self._leaving: list[weakref.ref[_Moved]] = []
        self._free: list[Tensor] = []  # host buffers, the smallest first
        self._count = self._first = 0
        self._largest = 0

    def saving(self) -> AbstractContextManager[None]:
        """Return a context for forward: what is saved in it is moved."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def leave(self, module: nn.Module) -> None:
        """Leave the weights and buffers of a module where they are; they may have moved since the last call."""
        self._weights = {
            tensor.untyped_storage()._cdata
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.layout is torch.strided
        }

    def free_buffers(self) -> None:
        """Free the buffers on the host that hold nothing."""
        self.host_bytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()

    # --- to the host ---

    def _pack(self, tensor: Tensor) -> _Left | _View:
        if not self._is_moved(tensor):
            # a result that is its own saved tensor would keep its graph alive
            return _Left(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        moved = self._of_storage.get(storage._cdata)
        # an address is used again: compare the storage too
        if moved is None or moved.source() is not storage or moved.version != tensor._version:
            moved = self._of_storage[storage._cdata] = self._move(tensor, storage)
        return _View(moved, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _is_moved(self, tensor: Tensor) -> bool:
        if (
            type(tensor) not in _PLAIN
            or tensor.device.type != self.device.type
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage._cdata in self._weights or isinstance(tensor, nn.Parameter) or size % tensor.itemsize:
            return False
        if size < self.min_bytes:
            self.largest_left_bytes = max(self.largest_left_bytes, size)
        return size >= self.min_bytes

    def _move(self, tensor: Tensor, storage: UntypedStorage) -> _Moved:
        size = storage.nbytes()
        whole = tensor.detach().as_strided((size // tensor.itemsize,), (1,), 0)
        if not self._moved:
            self._first = self._count
        moved = _Moved(self, self._count, whole, self._buffer(size), weakref.ref(storage), tensor)
        self._moved[self._count] = moved
        self._count += 1
        self._largest = max(self._largest, size)
        self.moved_bytes += size
        self._copy(moved, to_host=True)
        self._leaving.append(weakref.ref(moved))
        self._make_room()
        return moved

    def _make_room(self) -> None:
        """Free the oldest of what is on its way to the host, where it is too much, behind its copy."""
        leaving = [moved for ref in self._leaving if (moved := ref()) is not None and moved.whole is not None]
        while len(leaving) > 1 and sum(moved.bytes for moved in leaving) > self.in_flight * self._largest:
            oldest = leaving.pop(0)
            self._await_copy(oldest)
            oldest.whole = None
        self._leaving = [weakref.ref(moved) for moved in leaving]

    def _buffer(self, size: int) -> Tensor:
        """Return a host buffer of at least ``size`` bytes: the smallest that is free, or a new one."""
        for number, buffer in enumerate(self._free):
            if buffer.nbytes >= size:
                return self._free.pop(number)
        if self._free:  # all are too small: one makes room for a larger one
            self.host_bytes -= self._free.pop().nbytes
        buffer = self._new_buffer(size)
        self.host_bytes += buffer.nbytes
        return buffer

    def _new_buffer(self, size: int) -> Tensor:
        sizes = [(size, torch.uint8)]
        host_slabs.require_host_room("activations", sizes, _REMEDY)
        return host_slabs.host_tensors(sizes, self.device)[0]

    # --- back ---

    def _unpack(self, packed: _Left | _View) -> Tensor:
        if isinstance(packed, _Left):
            _require_unchanged(packed.tensor, packed.version)
            return packed.tensor
        moved = packed.moved
        _require_unchanged(moved.probe, moved.version)
        whole = self._bring_back(moved)
        self._await_copy(moved)
        self._prefetch(moved.number)
        return whole.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def _bring_back(self, moved: _Moved) -> Tensor:
        if moved.whole is None:
            moved.whole = torch.empty(moved.count, dtype=moved.probe.dtype, device=self.device)
            self._copy(moved, to_host=False)
        return moved.whole

    def _prefetch(self, number: int) -> None:
        """Bring back what was saved before ``number``, which backward comes to next."""
        ahead = 0
        for before in range(number - 1, self._first - 1, -1):
            moved = self._moved.get(before)
            if moved is None:
                continue
            ahead += moved.bytes
            if ahead > self.in_flight * self._largest:
                break
            self._bring_back(moved)

    # --- copies ---

    def _copy(self, moved: _Moved, *, to_host: bool) -> None:
        assert moved.whole is not None
        on_host = moved.host[: moved.bytes].view(moved.whole.dtype)
        target, source = (on_host, moved.whole) if to_host else (moved.whole, on_host)
        if self._stream is None:
            target.copy_(source)
            return
        # behind what fills the source, and what has used the target's memory until now
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            moved.copied = self._stream.record_event()

    def _await_copy(self, moved: _Moved) -> None:
        """Have the current stream wait until the last copy of a storage is done."""
        if moved.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(moved.copied)

    def _release(self, moved: _Moved) -> None:
        self._await_copy(moved)  # its memory on the device is used again
        self._free.append(moved.host)
        self._free.sort(key=lambda buffer: buffer.nbytes)


class _Moved:
    """A storage that was moved; the saved tensors that are views of it keep it.

    Attributes:
        number: in the order of saving.
        whole: all of it on the device, in one dimension; None while it is on the host alone.
        host: its buffer.
        bytes, count: of it, elements.
        source: the storage that was saved.
        probe: shows later changes of the saved tensor by its version, and holds no bytes.
        version: of the tensor when it was saved.
        copied: the event behind its last copy.
    """

    def __init__(
        self,
        offloader: Offloader,
        number: int,
        whole: Tensor,
        host: Tensor,
        source: weakref.ref[UntypedStorage],
        tensor: Tensor,
    ) -> None:
        self.offloader, self.number, self.host, self.source = offloader, number, host, source
        self.whole: Tensor | None = whole
        self.count, self.bytes = whole.numel(), whole.nbytes
        self.probe = tensor.detach()
        self.probe.data = tensor.new_empty(0)
        self.version = tensor._version
        self.copied: Any = None

    def __del__(self) -> None:
        self.offloader._release(self)


@dataclass
class _View:
    """A saved tensor whose storage was moved."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Left:
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


def _require_unchanged(tensor: Tensor, version: int) -> None:
    """Check what torch doesn't check in such a context.

    Raises:
        ConflictError: a saved tensor was changed in place since.
    """
    if tensor._version != version:
        raise ConflictError(
            f"a tensor saved for backward was changed in place afterwards, from version {version} to"
            f" {tensor._version}: its gradients would be wrong. Write x = x + y instead of x += y, relu(x) instead of"
            " relu_(x)"
        )
