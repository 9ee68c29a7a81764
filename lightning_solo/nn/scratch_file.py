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
"""Bytes to which places in the file are aligned: past the page cache, disks and memory take no less."""
_REMEDY = "write folder=<a folder on a local SSD with more room>, or take smaller micro-batches or shorter sequences"


def whole_pages(size: int) -> int:
    """Return a number of bytes rounded up to pages."""
    return -(-size // PAGE) * PAGE


class ScratchFile:
    """An unnamed file in a folder; it is removed when it is closed or the process ends, however it ends.

    It is made when the first place in it is taken. Places are taken at the lowest offset that has room; the disk's
    space is reserved with them. Transfers run one after the other, in the order of the calls, on one thread. Where the
    file system allows it, they bypass the page cache, which would take the host's memory.

    Args:
        folder: on a local disk.
        worker: runs transfers, one at a time and in order; by default a thread.

    Attributes:
        bytes: of the file, which grows to the most that was taken at a time.
        taken: offset -> bytes.
    """

    def __init__(self, folder: str | Path, worker: Executor | None = None) -> None:
        self.folder = Path(folder)
        self.bytes = 0
        self.taken: dict[int, int] = {}
        self._worker = worker
        self._file: Any = None
        self._is_closed = False

    def take(self, size: int) -> int:
        """Reserve a region of so many bytes, rounded up to pages; return its offset.

        Raises:
            BudgetError: the disk has no room for them.
            CapabilityError: no file can be made in the folder.
        """
        size, offset = whole_pages(size), 0
        for start, length in sorted(self.taken.copy().items()):  # garbage collection may give back in between
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
            BudgetError: the disk was full.
            CapabilityError: it couldn't be read or written.
        """
        try:
            transfer.result()
        except OSError as error:
            raise self._explained(error) from error

    def require_open(self) -> None:
        """Check that the file wasn't closed.

        Raises:
            ConflictError: it was.
        """
        if self._is_closed:
            raise ConflictError(
                "what this graph has saved was on a disk, and is removed since its fit has ended; run backward within"
                " the fit, or keep its tensors in memory"
            )

    def close(self) -> None:
        """Remove the file after the running transfer; a second call does nothing."""
        self._is_closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True, cancel_futures=True)
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)  # a process that was forked off has the file open, too
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
