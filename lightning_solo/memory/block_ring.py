"""Blocks of tensors in host memory, which pass through a few buffers on the device ahead of their use.

Each block has one place on the device: buffer ``number % window``, always at the same address. References to its
tensors, such as autograd's for backward, are right again once the block is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError
from lightning_solo.memory import host_slabs

_set_versions = torch._C._autograd._unsafe_set_version_counter
_LOADED, _GONE = 0, 1  # versions of a block's tensors on the device: autograd refuses one that is gone


_RINGS: WeakSet[BlockRing] = WeakSet()


def loaded_buffers() -> list[Tensor]:
    """Return the buffers on the device of all rings."""
    return [buffer for ring in _RINGS for buffer in ring.buffers]


class BlockRing:
    """Moves the data of blocks to the host, pinned if the device is a GPU, and loads each block when it is used.

    While a block is used, the next ones are copied into the other buffers on a separate stream. Their order is learned:
    after two blocks comes the one that came after these two last time. Where these two are new, it is the neighbour in
    their direction. On a CPU the same copies are made without a stream.

    Args:
        blocks: tensors of each block, dense and without gradients; their ``.data`` becomes the copy on the host.
        device: on which they are used.
        window: number of buffers, at least 2.
        remedy: what to write where the host has no room.

    Attributes:
        copies, copied_bytes: blocks copied to the device, and their bytes.
        host_bytes: bytes of all blocks on the host.
        buffers, device_bytes: the buffers on the device, none after `close`, and their bytes.

    Raises:
        BudgetError: the host has no room for the next block; tensors of earlier ones are copies already.

    >>> weights = [torch.full((2,), float(n)) for n in range(4)]
    >>> ring = BlockRing([[weight] for weight in weights], torch.device("cpu"), window=2)
    >>> for number in (0, 1, 2, 3, 2, 1, 0):
    ...     with ring.using(number) as (weight,):
    ...         assert torch.equal(weight, weights[number])
    >>> ring.copies, ring.device_bytes, ring.host_bytes  # two of four stay where the order turns
    (6, 256, 512)
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Tensor]],
        device: torch.device,
        window: int = 2,
        remedy: str = "store them in fewer bits",
    ) -> None:
        self.device = device
        self.copies = self.copied_bytes = 0
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._sources = [list(tensors) for tensors in blocks]
        self._stored: list[Tensor] = []
        for tensors in self._sources:  # one after the other, so that one block at most is in memory twice
            sizes = [(tensor.numel(), tensor.dtype) for tensor in tensors]
            host_slabs.require_host_room("a block's weights", sizes, remedy)
            stored, copies = host_slabs.host_copy(tensors, device)
            self._stored.append(stored)
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data = copy
        with torch.inference_mode(False), torch.no_grad():
            self._slots = [
                _Slot(max(stored.nbytes for stored in self._stored[first::window]), device)
                for first in range(min(window, len(self._stored)))
            ]
            self._loaded = [
                [
                    _like(tensor, part)
                    for tensor, part in zip(tensors, host_slabs.placed(slot.buffer, tensors), strict=True)
                ]
                for tensors, slot in ((each, self._slot(number)) for number, each in enumerate(self._sources))
            ]
        self._written: dict[int, Any] = {}  # block -> the event of its last copy to the host
        _RINGS.add(self)
        self._running: list[int] = []
        self._order: tuple[int, int] = (-1, -1)  # the last two blocks that were loaded for use
        self._followers: dict[tuple[int, int], int] = {}

    @property
    def host_bytes(self) -> int:
        return sum(stored.nbytes for stored in self._stored)

    @property
    def device_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def buffers(self) -> list[Tensor]:
        return [slot.buffer for slot in self._slots]

    @contextmanager
    def using(self, number: int) -> Iterator[list[Tensor]]:
        """Load a block, and yield its tensors on the device; in this context no other block takes its buffer.

        Raises:
            ConflictError: a block is used that has the same buffer.
        """
        self.load(number)
        self._running.append(number)
        try:
            yield self._loaded[number]
        finally:
            self._running.remove(number)

    def load(self, number: int) -> None:
        """Make a block's tensors readable by the current stream, and start to copy the blocks that follow."""
        if not self._slots:
            raise RuntimeError("the blocks' buffers are freed; run backward before the end of the fit")
        if number != self._order[1]:
            self._followers[self._order] = number
            self._order = self._order[1], number
        self._bring(number)
        slot = self._slot(number)
        if slot.copied is not None:
            self._await_copy(slot)
        for follower in self._following():
            self._bring(follower, ahead=True)

    def close(self) -> None:
        """Free the buffers. The tensors stay on the host."""
        if self._stream is not None:
            self._stream.synchronize()
        self._slots, self._loaded = [], []

    def _slot(self, number: int) -> _Slot:
        return self._slots[number % len(self._slots)]

    def _following(self) -> Iterator[int]:
        """Yield the blocks that are probably used next, as many as there are other buffers."""
        (before, now), count = self._order, len(self._slots)
        taken = {now % count}
        for _ in range(2 * count):
            step = now - before if abs(now - before) == 1 else 1
            before, now = now, self._followers.get((before, now), now + step)
            if len(taken) == count or not 0 <= now < len(self._stored):
                return
            if now % count not in taken:
                taken.add(now % count)
                yield now

    def _bring(self, number: int, *, ahead: bool = False) -> None:
        """Copy a block to its buffer unless it is there; ``ahead``: unless the buffer is in use."""
        slot = self._slot(number)
        versions = self._versions(number)  # a state dict may have been loaded
        if slot.holds == number and slot.versions == versions:
            return
        if slot.holds in self._running:
            if ahead:
                return
            raise ConflictError(
                f"block {number} is used inside block {slot.holds}, which has the same of {len(self._slots)} buffers;"
                f" write window={len(self._slots) + 1}"
            )
        if slot.holds >= 0:
            self._leave(slot.holds)
        self._copy(slot, number)
        slot.holds, slot.versions = number, versions
        _set_versions(tuple(self._loaded[number]), (_LOADED,) * len(versions))
        self.copies += 1
        self.copied_bytes += self._stored[number].nbytes

    def _versions(self, number: int) -> list[int]:
        """Return the versions of a block's numbers on the host."""
        return [tensor._version for tensor in self._sources[number]]

    def _leave(self, number: int) -> None:
        """Take a block off the device, whose buffer another one gets."""
        gone = self._loaded[number]
        _set_versions(tuple(gone), (_GONE,) * len(gone))

    def _copy(self, slot: _Slot, number: int) -> None:
        stored = self._stored[number]
        target = slot.buffer[: stored.nbytes]
        if self._stream is None:
            target.copy_(stored)
            return
        # after the operators that use the buffer's last block
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in (slot.emptied, self._written.get(number)):  # and after the copies from buffer and to the host
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            target.copy_(stored, non_blocking=True)
            slot.copied = self._stream.record_event()

    def _await_copy(self, slot: _Slot) -> None:
        torch.cuda.current_stream(self.device).wait_event(slot.copied)


class _Slot:
    """A buffer on the device, the block that it holds, and the versions of its sources when they were copied."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.holds = -1
        self.versions: list[int] = []
        self.copied: Any = None  # events of the last copies to it and from it
        self.emptied: Any = None


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a part of a buffer, as a parameter if the tensor is one, with a version of its own."""
    part = part.data
    return nn.Parameter(part, requires_grad=False) if isinstance(tensor, nn.Parameter) else part
