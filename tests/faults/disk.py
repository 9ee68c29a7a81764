"""A disk that fails after some bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file: Any, room: int, number: int) -> None:
        self.file, self.room, self.number = file, room, number

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        fitting = bytes(data)[: self.room]
        self.file.write(fitting)
        self.room -= len(fitting)
        if len(fitting) < len(data):
            raise OSError(self.number, os.strerror(self.number))
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def limited(monkeypatch: pytest.MonkeyPatch, room: int, number: int = errno.ENOSPC) -> None:
    """Let each new file fail after ``room`` bytes."""
    stock = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = stock(path, mode, *args, **kwargs)
        return Full(file, room, number) if "x" in mode else file

    monkeypatch.setattr(Path, "open", opened)
