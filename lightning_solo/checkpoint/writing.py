"""Write a checkpoint so that its path has either the former file or a verified new one, whatever happens."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_solo.atomic_files import whole_file
from lightning_solo.attributes import switched
from lightning_solo.checkpoint.damage import damage
from lightning_solo.errors import CheckpointError
from lightning_solo.units import format_bytes

REST = 1 << 20
"""Bytes that a file takes beside its tensors, at most; a guess for the check of free space."""


LARGE = 1 << 18
"""Bytes from which data is hashed where it is, without a copy."""


class Written(NamedTuple):
    """A file's size in bytes and its SHA-256."""

    size: int
    sha256: str


class _Hashed:
    """A file whose content is hashed while it is written, in a thread.

    Args:
        file: is written.
        pool: of the one thread that hashes.
        lasts: whether large data stays as it is after `write`, as that of tensors on the host does.
    """

    def __init__(self, file: IO[bytes], pool: ThreadPoolExecutor, *, lasts: bool) -> None:
        self._file, self._pool, self._lasts = file, pool, lasts
        self._hash = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None  # torch replaces it by another one

    def write(self, data: Any) -> int:
        is_large = len(data) >= LARGE
        hashing = self._pool.submit(self._hash.update, data if is_large else bytes(data))
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            if is_large and not self._lasts:
                hashing.result()
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def written(self) -> Written:
        self._pool.submit(int).result()  # after all others
        return Written(self.size, self._hash.hexdigest())


def write(
    checkpoint: Mapping[str, Any], path: Path, record: Callable[[Written], None] = lambda _: None, *, sync: bool = True
) -> Written:
    """Write a checkpoint, verify what was written, and only then let it replace the file at the path.

    The file is read back before it is used: its checksums must be right. A warning says so if torch can't load it with
    ``weights_only=True``.

    Args:
        checkpoint: as ``torch.save`` takes it.
        path: of the file.
        record: called with the file's size and hash just before it gets its name.
        sync: wait until the file and its name are on the disk, so that they survive a power failure.

    Raises:
        CheckpointError: the file can't be written, or not read back; the former file is unchanged.
    """
    hashed = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            _set_aside(path)
        _require_space(path, tensor_bytes(checkpoint) + REST)
        with whole_file(path, durable=sync) as new, ThreadPoolExecutor(1) as pool:
            # torch writes checksums, which a user may have turned off
            options = (torch.serialization.get_crc32_options, torch.serialization.set_crc32_options, True)
            with new.open("xb") as file, switched(*options):
                hashed = _Hashed(file, pool, lasts=_is_on_host(checkpoint))
                torch.save(checkpoint, cast(IO[bytes], hashed))
            verify(new, hashed.size)  # while the thread hashes the rest
            written = hashed.written()
            record(written)
    except (OSError, RuntimeError) as error:
        cause = error if hashed is None or hashed.error is None else hashed.error
        if isinstance(error, CheckpointError) or not isinstance(cause, OSError):
            raise
        raise CheckpointError(_cannot_be_written(path, cause, tensor_bytes(checkpoint) + REST)) from cause
    return written


def _set_aside(folder: Path) -> None:
    """Rename a folder that has the name of a file to write, such as one that another program left unfinished."""
    names = (folder.with_name(f"{folder.name}.before-{number}") for number in count(1))
    aside = folder.rename(next(name for name in names if not name.exists()))
    warnings.warn(f"{folder} was a folder; it is {aside.name} now, since a file is saved by its name", stacklevel=2)


def verify(path: Path, size: int) -> None:
    """Read back a file that was written; warn if torch can't load it with ``weights_only=True``.

    Raises:
        CheckpointError: it has another size or other content.
    """
    found = path.stat().st_size
    reason = damage(path) if found == size else f"it has {found:,} bytes, and {size:,} were written"
    if reason is not None:
        raise CheckpointError(f"the checkpoint can't be read back from {path.parent}: {reason}")
    if (reason := unloadable(path)) is not None:
        warnings.warn(
            f"the checkpoint is whole, but can't be resumed with weights_only=True: {reason}; leave such objects out,"
            " as in self.save_hyperparameters(ignore=[...])",
            stacklevel=2,
        )


def unloadable(path: Path) -> str | None:
    """Return why torch can't load a file with ``weights_only=True``; None if it can. Tensors are mapped, not read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds, by the content
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
    return None


def corrupt(path: Path) -> str | None:
    """Return why torch can't read a file, whatever objects it has; None if it can."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # an object that weights_only=True refuses
        return None
    except Exception as error:
        return str(error).partition(".")[0]
    return None


def digest(path: Path) -> Written:
    """Return the size and hash of a file."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
        return Written(file.tell(), found.hexdigest())


def _digest(file: IO[bytes]) -> Any:  # Python 3.10
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found


def tensor_bytes(checkpoint: Any) -> int:
    """Return the bytes of the storages of all tensors in a checkpoint."""
    storages = {}
    for tensor in _tensors(checkpoint):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), storage.device] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a checkpoint that have storages; of a subclass that wraps tensors these."""
    for leaf in tree_leaves(value):
        if hasattr(leaf, "__tensor_flatten__"):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor) and not leaf.is_meta and leaf.layout == torch.strided:
            yield leaf


def _is_on_host(checkpoint: Any) -> bool:
    """Return whether a checkpoint consists of plain data and tensors in host memory."""
    plain = (int, float, str, bytes, type(None))
    return all(leaf.is_cpu if isinstance(leaf, Tensor) else isinstance(leaf, plain) for leaf in tree_leaves(checkpoint))


def _require_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise CheckpointError(
            f"{path} needs {format_bytes(needed)}, and its disk has {format_bytes(free)} free; the former file is"
            f" unchanged. Free {format_bytes(needed - free)} there, or save to another folder, such as"
            " ModelCheckpoint(dirpath=...)"
        )


def _cannot_be_written(path: Path, error: OSError, needed: int) -> str:
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the quota of the disk is used up",
        errno.EFBIG: "a limit of the size of files is reached (ulimit -f)",
        errno.EROFS: "the disk is read-only",
        errno.EACCES: f"the folder can't be written by user {os.getuid()}",
        errno.EPERM: f"the folder can't be written by user {os.getuid()}",
    }
    reason = reasons.get(error.errno or 0, str(error))
    return (
        f"{path} can't be written: {reason}. It needs {format_bytes(needed)}; the former file is unchanged. Mend that,"
        " or save to another folder, such as ModelCheckpoint(dirpath=...)"
    )
