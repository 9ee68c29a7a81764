"""One run per folder of checkpoints."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import IO

from lightning_solo.atomic_files import try_lock
from lightning_solo.errors import CheckpointError

LOCK = ".lock"
"""File in a folder of checkpoints, locked by the run that writes them."""


def lock(folder: Path) -> IO[str]:
    """Lock a folder for this run, and remove what an earlier run left unfinished; return the locked file.

    The lock ends when the file is closed, however its process ends. Where the file system has no locks, a warning says
    so, and nothing is removed.

    Raises:
        CheckpointError: another run writes there; names its process and machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+", encoding="utf-8")
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
        owner = file.read().strip() or "another process"
        file.close()
        raise CheckpointError(
            f"{folder} is in use by {owner}: wait for that run, end it, or save to another folder, such as"
            " ModelCheckpoint(dirpath=...)"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    for left in folder.glob(".new-*"):  # nobody else writes here
        left.unlink(missing_ok=True)
    return file
