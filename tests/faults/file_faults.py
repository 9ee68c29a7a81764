"""Faults at every byte of a small checkpoint: a disk that is full there, a flipped byte, an end of the file."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_solo.checkpoint.manifest import Entry, append, difference
from lightning_solo.checkpoint.writing import write
from lightning_solo.errors import CheckpointError
from tests.faults.disk import limited

WEIGHTS = 16


def content(number: int) -> dict[str, Any]:
    """Return a small checkpoint, each value of which is of its number."""
    return {"global_step": number, "epoch": 0, "weight": torch.full((WEIGHTS,), float(number))}


def save(path: Path, number: int) -> None:
    """Write a checkpoint and its line in the manifest."""
    write(content(number), path, lambda written: append(path.parent, Entry(path.name, number, 0, *written)), sync=False)


def full_disk(folder: Path) -> Counter[str]:
    """Save over a checkpoint on a disk that is full after n bytes, for each n; count what became of the former file."""
    path = folder / "last.ckpt"
    save(path, 1)
    before, found = path.read_bytes(), Counter[str]()
    for room in range(len(before)):
        with pytest.MonkeyPatch.context() as patch:
            limited(patch, room)
            try:
                write(content(2), path, sync=False)
                found["no error"] += 1
            except CheckpointError:
                pass
        found["trials"] += 1
        found["former file lost"] += path.read_bytes() != before
        found["left over"] += len(list(folder.glob(".new-*")))
    return found


def full_disk_of_stock(folder: Path) -> Counter[str]:
    """As `full_disk` by Lightning's own writer, whose temporary file is on another disk than the checkpoint."""
    path, found, io = folder / "last.ckpt", Counter[str](), TorchCheckpointIO()
    io.save_checkpoint(content(1), path)
    before = path.read_bytes()

    def full(room: int, source: str, target: str, **_: Any) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:room])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def elsewhere(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    for room in range(len(before)):
        path.write_bytes(before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", elsewhere)  # as between two file systems
            patch.setattr(shutil, "copyfile", partial(full, room))
            patch.setattr(shutil, "copy2", partial(full, room))
            try:
                io.save_checkpoint(content(2), path)
                found["no error"] += 1
            except OSError:
                pass
        found["trials"] += 1
        found["former file lost"] += path.read_bytes() != before
    return found


def damage_at_every_byte(folder: Path) -> dict[str, Counter[str]]:
    """Flip each byte and cut at each byte; count by way what is refused, loads as it was, and loads otherwise."""
    path = folder / "last.ckpt"
    save(path, 1)
    whole = path.read_bytes()
    found = {name: Counter[str]() for name in ("ours", lightning.pytorch.__name__)}
    for place in range(len(whole)):
        flipped = whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
        for kind, changed in (("flipped", flipped), ("truncated", whole[:place])):
            path.write_bytes(changed)
            found["ours"][f"{kind}: " + ("found" if difference(path) else "missed")] += 1
            found[lightning.pytorch.__name__][f"{kind}: {stock_loads(path)}"] += 1
    return found


def stock_loads(path: Path) -> str:
    """Return what Lightning's own reader makes of a file."""
    try:
        loaded = TorchCheckpointIO().load_checkpoint(path, weights_only=True)
        same = loaded.keys() == content(1).keys() and torch.equal(loaded["weight"], content(1)["weight"])
        same = same and all(loaded[name] == content(1)[name] for name in ("global_step", "epoch"))
    except Exception:
        return "found"
    return "missed, loads as it was" if same else "missed, loads otherwise"
