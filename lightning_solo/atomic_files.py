"""Write files so that they are never incomplete, even if the process dies; lock files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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


def open_own(path: Path) -> IO[bytes]:
    """Open a file of ours to append to it, and to read; a new one is made.

    Raises:
        OSError: it can't be opened, or is a link, which may lead to a file of something else.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a+b")
    except OSError as error:
        if error.errno == errno.ELOOP:
            text = f"{path.name} in it is a link, which may lead to any file; remove this link"
            raise OSError(errno.ELOOP, text, str(path)) from None
        raise


def link_outwards(folder: Path, pattern: str = "**/*") -> Path | None:
    """Return a link among a folder's files that leads out of it, or the folder if it is a link itself; else None."""
    if folder.is_symlink():
        return folder
    inside = folder.resolve()
    links = (path for path in sorted(folder.glob(pattern)) if path.is_symlink())
    return next((path for path in links if not path.resolve().is_relative_to(inside)), None)


def is_name(text: str) -> bool:
    """Return whether a text is the name of a file, and no path.

    >>> [is_name(text) for text in ("last.ckpt", "../last.ckpt", "/last.ckpt", "..", "", "a" + chr(0), "a" * 300)]
    [True, False, False, False, False, False, False]
    """
    return Path(text).name == text != ".." and text.isprintable() and 0 < len(os.fsencode(text)) < 256


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
