"""Offload the tensors that autograd saves for backward to host memory, by copies on a separate stream."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_solo.memory import host_slabs
from lightning_solo.memory.block_ring import loaded_buffers
from lightning_solo.nn.saved_tensors import Left, Moved, View, require_unchanged

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # other classes hold their numbers in tensors of their own
_REMEDY = "take smaller micro-batches or shorter sequences"


class Offloader:
    """Copies the tensors that autograd saves to the host, frees them on the device, and copies them back for backward.

    A storage is moved once, even if several tensors of it are saved. Weights, buffers, their views and small storages
    stay on the device. So does a window of the most recently saved storages, which backward needs first. If the window
    exceeds its limit, its oldest storage is freed on the device. In backward, storages are copied back before they are
    needed, up to the same limit. On a GPU one stream runs the copies of both directions, so that a copy from a host
    buffer ends before the next copy into it begins. On a CPU the copies go into a second buffer.

    By default all storages are copied, and the window holds those whose copies are running. With ``keep_on_device``
    only storages that don't fit into the window are copied. The bytes saved in the last micro-batch predict which
    these are, so they are copied as soon as they are saved. The first micro-batch, and one that is larger than the
    last, wait for their copies.

    Copies belong to the graph: they are freed with it, whether backward runs, runs twice, or fails.

    Args:
        device: the tensors' device.
        min_bytes: size of the smallest storage that is moved.
        in_flight: limit of the default window, as a multiple of the largest storage's bytes.
        keep_on_device: limit of the window: bytes, an int; or a share of the bytes that the micro-batch has saved, a
            float. The storage that was saved last stays even if it is larger.

    Attributes:
        moved_bytes: all bytes copied to the host.
        saved_bytes: bytes of this micro-batch's storages that may be moved, or have been.
        host_bytes: bytes of the buffers on the host, which the micro-batches reuse.
        largest_left_bytes: bytes of the largest storage below ``min_bytes``, which stayed on the device.

    >>> offloader = Offloader(torch.device("cpu"), min_bytes=16)
    >>> x = torch.ones(8, requires_grad=True)
    >>> with offloader.saving():
    ...     loss = x.exp().sum()
    >>> loss.backward()
    >>> offloader.moved_bytes, offloader.host_bytes
    (32, 32)
    """

    def __init__(
        self,
        device: torch.device,
        min_bytes: int = 2**20,
        in_flight: int = 1,
        keep_on_device: int | float | None = None,
    ) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self.in_flight = in_flight
        self.keep_on_device = keep_on_device
        self.saved_bytes = self._expected = 0
        self.moved_bytes = self.host_bytes = self.largest_left_bytes = 0
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._weights: set[int] = set()
        self._moved: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()  # by number
        self._of_storage: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        self._window: dict[int, int] = {}  # number -> bytes, of storages on the device that backward hasn't come to
        self._window_bytes = 0
        self._near: list[int] = []  # sorted numbers of the window, and of storages freed since
        self._far: list[int] = []  # sorted numbers of what is on the host alone, or was
        self._free: list[Tensor] = []  # host buffers, the smallest first
        self._count = self._largest = 0

    def saving(self) -> AbstractContextManager[None]:
        """Return a context for forward, in which saved tensors are offloaded."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def leave(self, module: nn.Module) -> None:
        """Begin a micro-batch, and exclude the module's current weights and buffers from offloading."""
        self._begin()
        self._weights = {
            tensor.untyped_storage()._cdata
            for tensor in (*module.parameters(), *module.buffers(), *loaded_buffers())
            if tensor.layout is torch.strided
        }

    def free_buffers(self) -> None:
        """Free the unused buffers on the host."""
        self.host_bytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()

    # --- to the host ---

    def _pack(self, tensor: Tensor) -> Left | View:
        if not self._is_moved(tensor):
            # detached: a result that is saved itself would keep its graph alive
            return Left(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        moved = self._of_storage.get(storage._cdata)
        # the storage is compared, too, since another one may have the same address
        if moved is None or moved.source() is not storage or moved.version != tensor._version:
            moved = self._of_storage[storage._cdata] = self._move(tensor, storage)
        layout = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return View(moved, self._count - 1, *layout)

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

    def _move(self, tensor: Tensor, storage: UntypedStorage) -> Moved:
        size = storage.nbytes()
        whole = tensor.detach().as_strided((size // tensor.itemsize,), (1,), 0)
        if not self._moved:
            self._begin()
        leaves = self.keep_on_device is None or self.saved_bytes < self._expected - self._limit(self._expected)
        moved = Moved(self, self._count, whole, weakref.ref(storage), tensor)
        self._moved[self._count] = moved
        self._count += 1
        self._largest = max(self._largest, size)
        self.saved_bytes += size
        self._enter(moved)
        if leaves:
            self._copy_to_host(moved)
        self._make_room()
        return moved

    def _begin(self) -> None:
        """Expect as many saved bytes as in the last micro-batch."""
        if self.saved_bytes:
            self._expected, self.saved_bytes = self.saved_bytes, 0
        if not self._moved:
            self._window, self._window_bytes, self._near, self._far = {}, 0, [], []

    def _limit(self, saved_bytes: int) -> int:
        """Return the window's limit in bytes, for a micro-batch that saves ``saved_bytes``."""
        if self.keep_on_device is None:
            return self.in_flight * self._largest
        return self.keep_on_device if isinstance(self.keep_on_device, int) else int(self.keep_on_device * saved_bytes)

    def _enter(self, moved: Moved) -> None:
        self._window[moved.number] = moved.bytes
        self._window_bytes += moved.bytes
        insort(self._near, moved.number)

    def _leave_window(self, number: int) -> None:
        size = self._window.pop(number, 0)
        self._window_bytes -= size  # apart from the line above: garbage collection may call this method in between

    def _make_room(self) -> None:
        """Free the window's oldest storages after their copies, until it is within its limit."""
        while len(self._window) > 1 and self._window_bytes > self._limit(self.saved_bytes):
            number = self._near[0]
            moved = self._moved.get(number)
            if moved is not None and number in self._window:
                if moved.stored is None:
                    self._copy_to_host(moved)
                self._await_copy(moved)
                moved.whole = None
                insort(self._far, number)
            self._leave_window(number)
            del self._near[0]

    def _copy_to_host(self, moved: Moved) -> None:
        moved.stored = self._buffer(moved.bytes)
        self.moved_bytes += moved.bytes
        self._copy(moved, moved.stored, to_host=True)

    def _buffer(self, size: int) -> Tensor:
        """Return the smallest unused host buffer of at least ``size`` bytes, or a new one."""
        for number, buffer in enumerate(self._free):
            if buffer.nbytes >= size:
                return self._free.pop(number)
        if self._free:  # all are too small: a larger one replaces one of them
            self.host_bytes -= self._free.pop().nbytes
        buffer = self._new_buffer(size)
        self.host_bytes += buffer.nbytes
        return buffer

    def _new_buffer(self, size: int) -> Tensor:
        sizes = [(size, torch.uint8)]
        host_slabs.require_host_room("activations", sizes, _REMEDY)
        return host_slabs.host_tensors(sizes, self.device)[0]

    # --- back ---

    def _unpack(self, packed: Left | View) -> Tensor:
        if isinstance(packed, Left):
            require_unchanged(packed.tensor, packed.version)
            return packed.tensor
        moved = packed.moved
        require_unchanged(moved.probe, moved.version)
        whole = self._bring_back(moved)
        self._await_copy(moved)
        # backward has come to the last storage saved by then, not to this one, which earlier operators saved, too
        next_one = packed.last + (packed.last != moved.number)
        behind = bisect_left(self._near, next_one)
        for number in self._near[behind:]:
            self._leave_window(number)
        del self._near[behind:]
        self._prefetch(next_one)
        return whole.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def _bring_back(self, moved: Moved) -> Tensor:
        if moved.whole is None:
            self._copy_back(moved)
            self._enter(moved)
        assert moved.whole is not None
        return moved.whole

    def _copy_back(self, moved: Moved) -> None:
        self._fill(moved, moved.stored)

    def _fill(self, moved: Moved, memory: Tensor) -> None:
        moved.whole = torch.empty(moved.count, dtype=moved.probe.dtype, device=self.device)
        self._copy(moved, memory, to_host=False)

    def _prefetch(self, number: int) -> None:
        """Copy back the storages saved before ``number``, which backward needs next, up to the limit."""
        last = bisect_left(self._far, number)
        while last:
            before = self._moved.get(self._far[last - 1])
            if before is not None and before.whole is None:
                if self._window_bytes + before.bytes > self._limit(self.saved_bytes):
                    break
                self._bring_back(before)
            last -= 1
            del self._far[last]

    # --- copies ---

    def _copy(self, moved: Moved, memory: Tensor, *, to_host: bool) -> None:
        """Copy a storage between the device and memory of the host."""
        assert moved.whole is not None
        on_host = memory[: moved.bytes].view(moved.whole.dtype)
        target, source = (on_host, moved.whole) if to_host else (moved.whole, on_host)
        if self._stream is None:
            target.copy_(source)
            return
        # after the operators that fill the source or have used the target's memory
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            moved.copied = self._stream.record_event()

    def _await_copy(self, moved: Moved) -> None:
        """Make the current stream wait until the last copy of a storage is done."""
        if moved.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(moved.copied)

    def _release(self, moved: Moved) -> None:
        self._await_copy(moved)  # before its memory on the device is used again
        self._leave_window(moved.number)
        if moved.stored is not None:
            self._give_back(moved)

    def _give_back(self, moved: Moved) -> None:
        """Release the memory of a storage's copy for other storages."""
        self._free.append(moved.stored)
        self._free.sort(key=lambda buffer: buffer.nbytes)
