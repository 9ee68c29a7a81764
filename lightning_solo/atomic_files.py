"""Write files so that they are never incomplete, even if the process dies; lock files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r"\.new-\d+-\d+")
"""Names of unfinished files: process and thread that write them."""


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same folder; a file written there gets the name ``path`` at a clean end.

    After an exception it is removed, and an existing file ``path`` is unchanged. A ``durable`` file also survives a
    power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".new-{os.getpid()}-{threading.get_ident()}")
    try:
        yield new
        if durable:
            sync(new)
        new.replace(path)
        if durable:
            sync(path.parent)  # the name
    finally:
        new.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file by `whole_file`.

    Raises:
        OSError: it can't be written; an existing file is unchanged.
    """
    with whole_file(path, durable=durable) as new:
        new.write_bytes(content)


def write_json(path: Path, data: Mapping[Any, Any], *, durable: bool = True) -> None:
    """Write a mapping as JSON by `write_whole`."""
    write_whole(path, json.dumps(data).encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the mapping that `write_json` wrote; None where the file is missing or incomplete."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def try_lock(descriptor: int) -> bool:
    """Lock an open file unless another process has locked it; return whether this process has the lock.

    The kernel releases the lock when the file is closed, however its process ends. A process that inherits the open
    file holds the lock too.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
