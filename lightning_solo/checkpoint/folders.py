"""Checkpoints that are folders of files, as DeepSpeed's engine saves: whole or absent, and listed with hashes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import is_name, read_json, sync, write_json
from lightning_solo.checkpoint.writing import digest
from lightning_solo.errors import CheckpointError

BESIDE = ".deepspeed"
"""Ending of the folder that DeepSpeed's engine saves beside a file."""
HASHES = "sha256.json"
"""File in a folder with the size and SHA-256 of each other file."""


@contextmanager
def whole_folder(path: Path, *, hashes: bool = True) -> Iterator[Path]:
    """Yield a temporary folder in the same place, which gets the name ``path`` at a clean end.

    Its files are then on the disk, and with ``hashes`` listed in a file. After an exception it is removed, and an
    existing folder ``path`` is unchanged.
    """
    new = path.with_name(f".new-{os.getpid()}-{threading.get_ident()}")  # `lock` removes what a killed run leaves
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        files = sorted(file for file in new.rglob("*") if file.is_file())
        for file in files:
            sync(file)
        if hashes:
            write_json(new / HASHES, {file.relative_to(new).as_posix(): digest(file) for file in files})
        for folder in (new, *(each for each in new.rglob("*") if each.is_dir())):
            sync(folder)
        before = path.rename(new.with_name(f"{new.name}0")) if path.exists() else None
        try:
            new.rename(path)
        except OSError:
            if before is not None:
                before.rename(path)
            raise
        sync(path.parent)
        if before is not None:
            shutil.rmtree(before)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def refuse_changed(folder: Path) -> None:
    """Refuse a folder with a file that differs from the list of `whole_folder`. A folder without a list is accepted."""
    listed = read_json(folder / HASHES)
    if listed is None and (folder / HASHES).exists():
        raise CheckpointError(f"{folder} is damaged ({HASHES} can't be read); take another checkpoint")
    for name, written in (listed or {}).items():
        file = folder / name
        if not all(map(is_name, name.split("/"))):
            raise CheckpointError(
                f"{folder}: its {HASHES} names {name!r}, which is no file in it; take another checkpoint"
            )
        if not file.is_file() or list(digest(file)) != written:
            reason = "isn't as it was written" if file.is_file() else "is missing"
            raise CheckpointError(f"{folder} is damaged ({name} {reason}); take another checkpoint")


def local(path: Any) -> Path:
    """Return a path of this machine.

    Raises:
        CheckpointError: it is on another machine.
    """
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        raise CheckpointError(
            f"{text}: checkpoints are written and verified on this machine's disks; save to a local folder and upload"
            " the files afterwards, or write ~callback.safe_checkpoint"
        )
    return Path(rest if separator else text).absolute()
