"""The record of a folder's checkpoints, by which the newest valid one is found."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from lightning_solo.atomic_files import is_name, open_own, sync
from lightning_solo.checkpoint.damage import damage
from lightning_solo.checkpoint.folders import local
from lightning_solo.checkpoint.writing import Written, corrupt, digest
from lightning_solo.errors import CheckpointError, listed
from lightning_solo.machine import versions

MANIFEST = "manifest.jsonl"
"""File in a folder of checkpoints, with a line for each one that was written."""


@dataclass(frozen=True)
class Entry:
    """A line of a manifest: a file that was written.

    A line is written before its file gets its name. So a file is as it was written if any line has its hash, whatever
    happened in between, and a file may have been renamed.
    """

    file: str  # its name in the folder
    step: int  # optimizer steps at which it was saved
    epoch: int  # the epoch at which it was saved, counted from 0
    size: int  # its bytes
    sha256: str  # its hash
    configuration: str = ""  # hash of what trained: techniques, parameters and their shapes; empty if unknown
    versions: dict[str, str] | None = None  # package -> version that wrote it


def append(folder: Path, entry: Entry, *, durable: bool = True) -> None:
    """Add a line to the manifest of a folder."""
    path = folder / MANIFEST
    is_new = not path.exists()
    with open_own(path) as file:
        # a leading line break ends a line that a killed process has left unfinished
        file.write(b"\n" + json.dumps(asdict(entry)).encode() + b"\n")
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if is_new and durable:
        sync(folder)


def entries(folder: Path) -> list[Entry]:
    """Return the lines of a folder's manifest, the oldest first.

    Lines that can't be read are left out, and those of files in other folders.
    """
    try:
        lines = (folder / MANIFEST).read_bytes().splitlines() if (folder / MANIFEST).is_file() else []
    except OSError:
        return []
    return [entry for line in lines if (entry := _parsed(line)) is not None]


def _parsed(line: bytes) -> Entry | None:
    try:
        values = json.loads(line)
        entry = Entry(**{field.name: values[field.name] for field in fields(Entry) if field.name in values})
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = isinstance(entry.step, int) and isinstance(entry.epoch, int) and isinstance(entry.size, int)
    texts = isinstance(entry.file, str) and isinstance(entry.sha256, str)
    return entry if numbers and texts and is_name(entry.file) else None


def difference(path: Path) -> str | None:
    """Return how a checkpoint's file differs from what was written; None if it doesn't.

    A file that the manifest doesn't list is checked by the checksums of its entries alone.
    """
    if not path.is_file():
        return "it isn't there"
    listed_here = entries(path.parent)
    if not any(entry.file == path.name for entry in listed_here):
        renamed = bool(listed_here) and digest(path) in map(_written, listed_here)
        return None if renamed else damage(path) or corrupt(path)
    sizes = {entry.size for entry in listed_here}
    size = path.stat().st_size
    if size not in sizes:
        return damage(path) or f"it has {size:,} bytes, which no line of {MANIFEST} has"
    if digest(path) not in map(_written, listed_here):
        return damage(path) or f"its SHA-256 is in no line of {MANIFEST}"
    return None


def _written(entry: Entry) -> Written:
    return Written(entry.size, entry.sha256)


def require_valid(path: Path) -> None:
    """Refuse a checkpoint that isn't as it was written."""
    if (reason := difference(path)) is None:
        return
    others = [other.name for other in _files(path.parent) if other != path and difference(other) is None]
    beside = f"valid here: {listed(others)}" if others else "there is no valid one beside it"
    raise CheckpointError(
        f"{path} isn't as it was written ({reason}); {beside}. Resume from another file, or with ckpt_path="
        f"solo.latest_checkpoint({str(path.parent)!r})"
    )


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest valid checkpoint in a folder; None if the folder has no checkpoints.

    The newest is the one of the most optimizer steps, whatever the files' times are. Its content is compared with the
    manifest that was written with them. Files that it doesn't list are checked by the checksums within them, and
    the returned one gets a line. A warning names each file that is passed over, such as a link to a file in another
    folder.

    Raises:
        CheckpointError: there are checkpoints, and none is valid; or the folder is on another machine.
    """
    root = local(folder) if "://" in str(folder) else Path(folder)
    found = sorted(_candidates(root), key=lambda each: each[:3], reverse=True)
    rejected: list[str] = []
    for _, _, _, path in found:
        reason = _leads_out(path) or difference(path)
        if reason is None:
            _warn_of(rejected, path)
            _warn_of_newer(root, path)
            _relist(root, path)
            return str(path)
        rejected.append(f"{path.name}: {reason}")
    if rejected:
        raise CheckpointError(
            f"no valid checkpoint in {root}: {'; '.join(rejected)}. Restore one from a copy, or train from the"
            " beginning in another folder"
        )
    return None


def _warn_of_newer(root: Path, path: Path) -> None:
    written = next((entry.versions for entry in reversed(entries(root)) if entry.file == path.name), None)
    newer = []
    for name, version in written.items() if isinstance(written, dict) else ():
        try:
            if Version(version) > Version(versions()[name]):
                newer.append(f"{name} {version}")
        except (InvalidVersion, KeyError, TypeError):
            continue
    if newer:
        warnings.warn(
            f"{path.name} was written by {listed(newer)}, and older versions are installed here: if it can't be read,"
            f" write pip install {' '.join(repr(each.replace(' ', '==')) for each in newer)}",
            stacklevel=4,
        )


def _leads_out(path: Path) -> str | None:
    target = path.resolve()
    return None if target.parent == path.parent.resolve() else f"it is a link to {target}, in another folder"


def _warn_of(rejected: list[str], path: Path) -> None:
    for text in rejected:
        warnings.warn(f"passed over {text}; resuming from {path.name}", stacklevel=4)


def _candidates(root: Path) -> Iterator[tuple[int, int, str, Path]]:
    """Yield (step, number of the line, name, path) of each checkpoint."""
    lines = entries(root)
    numbers = {entry.file: (entry.step, number) for number, entry in enumerate(lines)}
    for path in _files(root):
        step, number = numbers.get(path.name) or (step_of(path), -1)
        yield step, number, path.name, path


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.ckpt") if path.is_file())


def step_of(path: Path) -> int:
    """Return the optimizer steps of a checkpoint's file; of one that can't be read, a number above all others."""
    if damage(path) is not None:
        return sys.maxsize
    step = _content(path).get("global_step", -1)
    return step if isinstance(step, int) else -1


def _content(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # of many kinds, by what the file holds
        return {}
    return content if isinstance(content, dict) else {}


def list_file(path: Path) -> None:
    """Add a line for a valid file that was written otherwise, if its folder has a manifest."""
    if entries(path.parent):
        _append_found(path)


def _relist(root: Path, path: Path) -> None:
    """Add a line for a valid file that has none."""
    if not any(entry.file == path.name for entry in entries(root)):
        try:
            _append_found(path)
        except OSError:  # a folder that can only be read
            return


def _append_found(path: Path) -> None:
    content, found = _content(path), digest(path)
    step, epoch = (value if isinstance(value := content.get(name), int) else 0 for name in ("global_step", "epoch"))
    append(path.parent, Entry(path.name, step, epoch, found.size, found.sha256))
