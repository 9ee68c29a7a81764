"""The last checkpoint of a run, and the check that tells a damaged file from one that can't be used otherwise."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_solo.errors import CheckpointError

LAST = Path("checkpoints", "last.ckpt")
"""The last checkpoint in the folder of a run."""


def loaded(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the checkpoint that ``load`` reads from a path.

    Raises:
        CheckpointError: the file is damaged; names the other checkpoints in its folder.
    """
    try:
        return load(path, *args, **kwargs)
    except Exception:
        refuse_damaged(Path(path), "ckpt_path=...")
        raise


def refuse_damaged(path: Path, another: str) -> None:
    """Read a checkpoint's file to its end, and refuse one that isn't as it was written; leave folders alone.

    Args:
        path: the file.
        another: the argument that names another run or checkpoint, for the message.

    Raises:
        CheckpointError: the file is damaged; names the reason and the other checkpoints in its folder.
    """
    if path.is_file() and (reason := _damage(path)):
        others = ", ".join(sorted(other.name for other in path.parent.glob("*.ckpt") if other != path))
        beside = f"; other checkpoints here: {others}" if others else ""
        raise CheckpointError(f"{path} is damaged ({reason}){beside}; replace it, or take another: {another}")


def _damage(path: Path) -> str | None:
    if not path.stat().st_size:
        return "it is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        return str(error)
    return part and f"{part} has another checksum"
