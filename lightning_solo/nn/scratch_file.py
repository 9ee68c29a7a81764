"""An unnamed temporary file that a separate thread reads and writes."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_solo.errors import BudgetError, CapabilityError, ConflictError
from lightning_solo.memory import host_slabs
from lightning_solo.units import format_bytes

PAGE = 4096
"""Bytes to which regions are aligned, as transfers that bypass the page cache need."""
_REMEDY = (
    "write callback.activation_offloading.folder=<a folder on a local SSD with more room>, or take smaller"
    " micro-batches or shorter sequences"
)


def whole_pages(size: int) -> int:
    """Round bytes up to whole pages."""
    return -(-size // PAGE) * PAGE


class ScratchFile:
    """An unnamed file in a folder, removed when it is closed or the process ends.

    The first `take` creates it. A region is at the lowest offset that has room; its disk space is reserved. One thread
    runs the transfers in the order of the calls. If the file system allows it, they bypass the page cache, which would
    use up the host's memory.

    Args:
        folder: a folder on a local disk.
        worker: runs transfers one at a time, in order; by default a thread.

    Attributes:
        bytes: size of the file.
        taken: offset -> bytes of each region in use.
    """

    def __init__(self, folder: str | Path, worker: Executor | None = None) -> None:
        self.folder = Path(folder)
        self.bytes = 0
        self.taken: dict[int, int] = {}
        self._worker = worker
        self._file: Any = None
        self._is_closed = False

    def take(self, size: int) -> int:
        """Reserve a region of ``size`` bytes, rounded up to pages; return its offset.

        Raises:
            BudgetError: the disk is full.
            CapabilityError: no file can be created in the folder.
        """
        size, offset = whole_pages(size), 0
        for start, length in sorted(self.taken.copy().items()):  # copied: garbage collection may free regions
            if start - offset >= size:
                break
            offset = start + length
        self._grow(offset + size)
        self.taken[offset] = size
        return offset

    def give_back(self, offset: int) -> None:
        """Free a region; queued transfers run first."""
        self.taken.pop(offset, None)

    def write(self, offset: int, memory: Tensor, after: Any = None) -> Future[None]:
        """Write whole pages of host memory to a region, after the event ``after``."""
        return self._submit(os.pwritev, offset, memory, after)

    def read(self, offset: int, memory: Tensor, after: Any = None) -> Future[None]:
        """Fill whole pages of host memory from a region, after the event ``after``."""
        return self._submit(os.preadv, offset, memory, after)

    def wait(self, transfer: Future[None]) -> None:
        """Wait until a transfer is done.

        Raises:
            BudgetError: the disk is full.
            CapabilityError: the disk couldn't be read or written.
        """
        try:
            transfer.result()
        except OSError as error:
            raise self._explained(error) from error

    def require_open(self) -> None:
        """Raise ConflictError if the file is closed."""
        if self._is_closed:
            raise ConflictError(
                "the tensors that this graph saved were in a file that was removed when its fit has ended; run backward"
                " within the fit, or keep the tensors in memory"
            )

    def close(self) -> None:
        """Remove the file after the running transfer; a second call does nothing."""
        self._is_closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True, cancel_futures=True)
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)  # a forked process may have it open, too
            self._file.close()
            self._file = None
        self.bytes = 0
        self.taken.clear()

    def _grow(self, size: int) -> None:
        """Reserve disk space for a larger file."""
        self.require_open()
        if size <= self.bytes:
            return
        if not host_slabs.is_planned():
            try:
                if self._file is None:
                    self._file = _without_name(self.folder)
                self._reserve(size)
            except OSError as error:
                raise self._explained(error, size) from error
        self.bytes = size

    def _reserve(self, size: int) -> None:
        system = os.fstatvfs(self._file.fileno())
        if size - self.bytes > system.f_bavail * system.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(self._file.fileno(), self.bytes, size - self.bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that can't reserve
                raise

    def _submit(self, transfer: Callable[..., int], offset: int, memory: Tensor, after: Any) -> Future[None]:
        if host_slabs.is_planned():
            done: Future[None] = Future()
            done.set_result(None)
            return done
        self.require_open()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "scratch-file")
        return self._worker.submit(_transferred, transfer, self._file.fileno(), offset, memory, after)

    def _explained(self, error: OSError, size: int = 0) -> BudgetError | CapabilityError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return CapabilityError(f"activations on a disk, in folder={str(self.folder)!r}: {error}; {_REMEDY}")
        needed, system = max(size, self.bytes), os.statvfs(self.folder)
        free = self.bytes + system.f_bavail * system.f_frsize
        return BudgetError(
            f"activations of {format_bytes(needed)} and more on a disk, in folder={str(self.folder)!r}, which has room"
            f" for {format_bytes(free)}; {_REMEDY}",
            needed,
            free,
        )


def _without_name(folder: Path) -> Any:
    """Return an open file that has no entry in its folder."""
    file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (it stays open)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with suppress(OSError, AttributeError):  # a file system, or a system, without it
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
    return file


def _transferred(transfer: Callable[..., int], file: int, offset: int, memory: Tensor, after: Any) -> None:
    if after is not None:
        after.synchronize()
    array: Any = memory.numpy()
    rest = memoryview(array)
    while rest:
        done = transfer(file, [rest], offset)
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        rest, offset = rest[done:], offset + done
