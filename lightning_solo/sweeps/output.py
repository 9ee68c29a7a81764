"""A job's output: its file, which is cut when it grows too large, and its last lines."""

from __future__ import annotations

import os
from pathlib import Path

FILE = "output.log"
KEPT_BYTES = 2**20
"""Bytes at the end of the output that are kept when it is cut."""


def output_file(folder: str) -> Path:
    """Return the path of a job's output, and create its folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder, FILE)


def cut_output(path: Path, most_bytes: int) -> None:
    """Keep the end of an output longer than ``most_bytes`` (0: no limit); lines written meanwhile may be lost."""
    try:
        if not most_bytes or path.stat().st_size <= most_bytes:
            return
        kept_bytes = min(KEPT_BYTES, most_bytes // 2)
        with path.open("rb+") as file:
            file.seek(-kept_bytes, os.SEEK_END)
            end = file.read(kept_bytes)
            file.truncate(0)
        with path.open("ab") as file:
            file.write(b"... (the output was larger than hydra.launcher.output_mib; this is its end)\n" + end)
    except OSError:
        return


def redirect_output(descriptor: int) -> None:
    """Redirect this process's output to a file, and give it an empty standard input."""
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    os.close(empty)


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file, without reading all of a large one."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 200 * lines, 0))
            return file.read().decode(errors="replace").splitlines()[-lines:] if lines else []
    except OSError:
        return []
