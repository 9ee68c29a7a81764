"""The folder for a run's tensors on disk, and the buffers through which weights are read from it."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from torch import nn

from lightning_solo.atomic_files import try_lock
from lightning_solo.errors import CapabilityError
from lightning_solo.zero.layout import MIN_DISK_BYTES

log = logging.getLogger(__name__)

PREFIX = "zero_offload-"


@contextmanager
def run_folder(parent: str | Path) -> Iterator[Path]:
    """Make this run's folder below ``parent`` and remove it at the end; first remove the folders of killed runs.

    A run holds the lock of its folder until its process ends.

    Raises:
        CapabilityError: the folder can't be written or locked.
    """
    parent = Path(parent).expanduser().absolute()
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{PREFIX}*"):
            _remove_if_left(left)
        folder, lock = _locked_folder(parent)
    except OSError as error:
        raise CapabilityError(
            f"nvme_path={str(parent)!r}: {error}; write strategy.nvme_path=<a folder on a local SSD that you may write>"
        ) from None
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for empty in missing:
                with suppress(OSError):  # another run is in it
                    empty.rmdir()


def _locked_folder(parent: Path) -> tuple[Path, IO[str]]:
    starting = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # hidden until it is locked
    with ExitStack() as undo:  # for a file system without locks
        undo.callback(shutil.rmtree, starting, ignore_errors=True)
        lock = undo.enter_context((starting / "lock").open("w"))
        try_lock(lock.fileno())  # no other process knows the folder yet
        folder = starting.rename(parent / starting.name.removeprefix("."))
        undo.pop_all()
    return folder, lock


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / "lock").open("r+") as lock:
            if try_lock(lock.fileno()):
                log.warning("zero_offload: removed %s, the folder of a killed run", folder)
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # no run's folder, or another user's
        return


def parameter_buffers(module: nn.Module, element_bytes: int) -> dict[str, int]:
    """Return DeepSpeed's size and count of the buffers for weights that are read from disk.

    Args:
        module: before it is partitioned.
        element_bytes: bytes of an element on the device; parameters below ``MIN_DISK_BYTES`` stay in memory.
    """
    on_disk = [
        [n for p in part.parameters(recurse=False) if (n := p.numel()) * element_bytes >= MIN_DISK_BYTES]
        for part in module.modules()
    ]
    # At least DeepSpeed's 5, and enough for one module and the next one, which is prefetched. With fewer or smaller
    # buffers a run ends with "Not enough buffers" or "More elements than buffer size".
    return {
        "buffer_size": max((max(numels) for numels in on_disk if numels), default=MIN_DISK_BYTES),
        "buffer_count": max(5, 2 * max(map(len, on_disk))),
    }
