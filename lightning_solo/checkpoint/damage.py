"""Damaged checkpoints, which torch may load without noticing."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.errors import CheckpointError

LAST = Path("checkpoints", "last.ckpt")
"""The last checkpoint in the folder of a run."""
THREADS = 2
"""Threads that read a file to compare its checksums."""
BLOCK = 1 << 20
FOLDER = 0x10
"""Attribute of an archive's entry that is a folder, which torch reads as empty."""


def loaded(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the checkpoint that ``load`` reads from a path, after a check of the file.

    Raises:
        CheckpointError: the file is damaged; names the other checkpoints in its folder.
    """
    refuse_damaged(Path(path), "ckpt_path=...")
    return load(path, *args, **kwargs)


def refuse_damaged(path: Path, another: str) -> None:
    """Read a checkpoint's file to its end, and refuse one that isn't as it was written; leave folders alone.

    Raises:
        CheckpointError: the file is damaged; names the reason and the other checkpoints in its folder.
    """
    if path.is_file() and (reason := damage(path)):
        raise CheckpointError(f"{path} is damaged ({reason}){beside(path)}; replace it, or take another: {another}")


def beside(path: Path) -> str:
    """Return a part of a message with the other checkpoints in a file's folder that aren't damaged; empty if none."""
    others = sorted(other.name for other in path.parent.glob("*.ckpt") if other != path and damage(other) is None)
    return f"; other checkpoints here: {', '.join(others)}" if others else ""


def damage(path: Path) -> str | None:
    """Return how a file differs from what was written, by the checksums of its entries; None if it doesn't."""
    try:
        if not path.stat().st_size:
            return "it is empty"
        with zipfile.ZipFile(path) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.file_size)
        with ThreadPoolExecutor(THREADS) as pool:
            return next(
                filter(None, pool.map(partial(_changed, path), (entries[n::THREADS] for n in range(THREADS)))), None
            )
    except Exception as error:  # of many kinds, by the content
        return str(error) or type(error).__name__


def _changed(path: Path, entries: list[zipfile.ZipInfo]) -> str | None:
    with zipfile.ZipFile(path) as archive:
        for entry in entries:
            if entry.external_attr & FOLDER:
                return f"{entry.filename} is marked as a folder"
            try:
                with archive.open(entry) as content:
                    while content.read(BLOCK):
                        pass
            except zipfile.BadZipFile as error:
                return f"{entry.filename} has another checksum" if "CRC" in str(error) else str(error)
    return None
