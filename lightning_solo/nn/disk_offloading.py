"""Offload the tensors that autograd saves for backward to a disk, through a few buffers of host memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_solo.nn.offloading import Offloader
from lightning_solo.nn.saved_tensors import Moved
from lightning_solo.nn.scratch_file import ScratchFile, whole_pages

STAGING_BUFFERS = 4
"""Buffers as large as the largest storage. Forward fills one while another is written; backward reads three ahead."""


class DiskOffloader(Offloader):
    """An `Offloader` that copies saved tensors to a file on a local disk, so that host memory doesn't grow.

    A storage goes through one of ``STAGING_BUFFERS`` buffers of host memory. A thread writes it while forward
    continues, and reads it ahead of backward. Forward waits if all buffers wait for the disk.

    Args:
        device, min_bytes, in_flight, keep_on_device: as `Offloader`.
        folder: folder of the file, which has no name and is gone when the process ends.
        worker: as `ScratchFile`.

    Raises:
        BudgetError: in forward or backward, if the disk or the host has too little room.
        CapabilityError: in forward or backward, if the disk can't be written or read.

    >>> import tempfile
    >>> offloader = DiskOffloader(torch.device("cpu"), tempfile.gettempdir(), min_bytes=4096)
    >>> x = torch.ones(1024, requires_grad=True)
    >>> with offloader.saving():
    ...     loss = x.exp().exp().sum()
    >>> loss.backward()
    >>> offloader.disk_bytes, offloader.host_bytes
    (8192, 8192)
    >>> offloader.free_buffers()
    """

    def __init__(
        self,
        device: torch.device,
        folder: str | Path,
        min_bytes: int = 2**20,
        in_flight: int = 1,
        keep_on_device: int | float | None = None,
        worker: Executor | None = None,
    ) -> None:
        super().__init__(device, min_bytes, in_flight, keep_on_device)
        self._file = ScratchFile(folder, worker)
        self._buffers = 0
        self._idle: deque[_Buffer] = deque()  # the least recently used one first
        self._reading: dict[int, _Buffer] = {}  # number of a storage -> buffer that it is read to ahead of its use

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.bytes

    def free_buffers(self) -> None:
        """Remove the file and free the buffers; saved tensors on the disk are lost."""
        self._file.close()
        self._idle.clear()
        self._reading.clear()
        self.host_bytes = self._buffers = 0

    def _copy_to_host(self, moved: Moved) -> None:
        offset = self._file.take(moved.bytes)
        try:
            buffer = self._staging(moved.bytes)
            self._copy(moved, buffer.memory, to_host=True)
            buffer.copied = moved.copied
            buffer.transfer = self._file.write(offset, buffer.pages(moved.bytes), buffer.copied)
        except BaseException:
            self._file.give_back(offset)
            raise
        self._idle.rotate(-1)
        moved.stored = _Place(offset, buffer.transfer)
        self.moved_bytes += moved.bytes

    def _copy_back(self, moved: Moved) -> None:
        self._file.require_open()
        buffer = self._reading.pop(moved.number, None) or self._read(moved)
        assert buffer.transfer is not None
        try:
            self._read_ahead(moved.number)
            self._file.wait(moved.stored.written)
            self._file.wait(buffer.transfer)
            self._fill(moved, buffer.memory)
            buffer.copied = moved.copied
        finally:
            self._idle.append(buffer)

    def _read_ahead(self, number: int) -> None:
        """Read the storages that were saved before ``number``, while there are idle buffers."""
        for index in reversed(range(bisect_left(self._far, number))):
            if not self._idle:
                return
            before = self._moved.get(self._far[index])
            if before is not None and before.whole is None and before.number not in self._reading:
                self._reading[before.number] = self._read(before)

    def _read(self, moved: Moved) -> _Buffer:
        buffer = self._staging(moved.bytes)
        buffer.transfer = self._file.read(moved.stored.offset, buffer.pages(moved.bytes), buffer.copied)
        return self._idle.popleft()

    def _staging(self, size: int) -> _Buffer:
        """Return the first idle buffer when its last transfer is done, enlarged to ``size`` bytes."""
        if self._buffers < min(STAGING_BUFFERS, len(self._file.taken)):
            self._buffers += 1
            self._idle.appendleft(_Buffer())
        elif not self._idle:  # all are reading ahead: take the one that is needed last
            self._idle.append(self._reading.popitem()[1])
        buffer = self._idle[0]
        if buffer.transfer is not None:
            self._file.wait(buffer.transfer)
        if buffer.memory.nbytes < size:
            self.host_bytes -= buffer.memory.nbytes
            buffer.memory = _Buffer().memory  # frees it before the next allocation
            buffer.memory = self._new_buffer(whole_pages(size))
            self.host_bytes += buffer.memory.nbytes
        return buffer

    def _give_back(self, moved: Moved) -> None:
        buffer = self._reading.pop(moved.number, None)
        if buffer is not None:
            self._idle.append(buffer)
        self._file.give_back(moved.stored.offset)


class _Place(NamedTuple):
    """The offset of a region in the file, and the transfer that writes it."""

    offset: int
    written: Future[None]


class _Buffer:
    """A buffer of host memory between device and disk.

    Attributes:
        memory: empty before its first use.
        transfer: its last transfer from or to the disk.
        copied: the event after its last copy from or to the device.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.transfer: Future[None] | None = None
        self.copied: Any = None

    def pages(self, size: int) -> Tensor:
        """Return the buffer's first pages, as many as ``size`` bytes need."""
        return self.memory[: whole_pages(size)]
