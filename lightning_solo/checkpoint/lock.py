"""One run per folder of checkpoints."""

from __future__ import annotations

import os
import shutil
import socket
import warnings
import weakref
from pathlib import Path
from typing import IO

from lightning_solo.atomic_files import TEMPORARY, open_own, try_lock
from lightning_solo.errors import CheckpointError

LOCK = ".lock"
"""File in a folder of checkpoints, locked by the run that writes them."""


def lock(folder: Path, another: str = "ModelCheckpoint(dirpath=...)") -> IO[bytes]:
    """Lock a folder for this run, and remove what an earlier run left unfinished; return the locked file.

    The lock ends when the file is closed, however its process ends. Where the file system has no locks, a warning says
    so, and nothing is removed.

    Args:
        folder: is made if it is missing.
        another: the argument that names another folder, for the message.

    Raises:
        CheckpointError: another run writes there; names its process and machine.
        OSError: the folder can't be written, or its lock is a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open_own(folder / LOCK)
    try:
        is_ours = try_lock(file.fileno())
    except OSError as error:
        warnings.warn(
            f"{folder}: its file system has no locks ({error.strerror}), so two runs that save there at the same time"
            " aren't noticed",
            stacklevel=3,
        )
        return file
    if not is_ours:
        file.seek(0)
        owner = file.read(200).decode(errors="replace").strip() or "another process"
        file.close()
        raise CheckpointError(
            f"{folder} is in use by {owner}: wait for that run, end it, or save to another folder, such as {another}"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    _HELD.add(file)
    for left in folder.glob(".new-*"):  # nobody else writes here
        if TEMPORARY.fullmatch(left.name):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink(missing_ok=True)
    return file


def holds(file: IO[bytes], folder: Path) -> bool:
    """Return whether a file that `lock` returned is still the lock of the folder, which may have been deleted."""
    try:
        return os.path.samestat((folder / LOCK).stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


_HELD: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _close_in_child() -> None:
    """Leave the locks to the parent: the worker of a loader may outlive a run that is killed."""
    for file in list(_HELD):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
