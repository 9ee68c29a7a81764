"""Lightning's interface for reading and writing checkpoints, over files that are never lost."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightning_solo.checkpoint.folders import BESIDE, local
from lightning_solo.checkpoint.lock import holds, lock
from lightning_solo.checkpoint.manifest import Entry, append, difference, entries, require_valid
from lightning_solo.checkpoint.plain import plain
from lightning_solo.checkpoint.snapshot import Snapshots
from lightning_solo.checkpoint.writing import Written, tensor_bytes, write
from lightning_solo.errors import CheckpointError, listed
from lightning_solo.machine import versions
from lightning_solo.memory.host_slabs import host_room
from lightning_solo.units import format_bytes


class SafeIO:
    """Writes checkpoints by `checkpoint.writing.write`, and reads only those that are as they were written.

    Args:
        before: Lightning's object of this kind, which reads.
        asynchronous: write a copy in a thread.
        durable: wait until a file is on the disk.
    """

    def __init__(self, before: Any, *, asynchronous: bool, durable: bool) -> None:
        self.before = before
        self.asynchronous = asynchronous
        self.durable = durable
        self.configuration = ""  # hash of what trains
        self.holds_locks = False  # until `release`
        self.removes = True  # whether checkpoints may be removed, as in a fit and after it
        self.failure = ""  # the error with which the fit ends
        self.is_half_stepped = False  # whether it came while weights were updated
        self._locks: dict[Path, IO[bytes]] = {}
        self._verified: dict[Path, tuple[int, int]] = {}  # written by this run -> size, time
        self._thread: threading.Thread | None = None
        self._removals: list[Any] = []  # paths to remove once the thread has written
        self._error: BaseException | None = None
        self._warned = self._left_out = False
        self._snapshots = Snapshots()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_locks": {}, "_thread": None, "_error": None, "_removals": [], "_snapshots": Snapshots()}

    # --- Lightning's interface ---

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint. In a fit that has failed, an error is a warning, and half a step is not saved.

        Raises:
            CheckpointError: it can't be written; the former file is unchanged. With ``asynchronous`` the next call
                raises it.
        """
        if self.is_half_stepped:
            warnings.warn(
                f"{path} isn't saved: the fit failed while the weights were updated ({self.failure}); resume from the"
                " checkpoint before",
                stacklevel=2,
            )
            return
        with self._after_failure():
            self._save(checkpoint, path, storage_options)

    def _save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        if storage_options is not None:
            raise TypeError("save_checkpoint takes no storage_options under SafeCheckpoint: it writes local files")
        target = local(path)
        self.wait()
        try:
            self.claim(target.parent)
            checkpoint, left_out = plain(checkpoint)
            self._warn_of(left_out)
            if self.asynchronous and self.holds_locks and not self.failure and self._has_room(checkpoint):
                write = partial(self._write_in_thread, self._snapshots.copy(checkpoint), target)
                self._thread = threading.Thread(target=write, name="checkpoint")
                self._thread.start()
            else:
                self._write(checkpoint, target)
        finally:
            if not self.holds_locks:  # after the fit
                self.release()

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a checkpoint that is as it was written.

        Raises:
            CheckpointError: it isn't; names the valid ones beside it.
        """
        self.wait()
        target = local(path)
        if target.is_file():
            require_valid(target)
        return self.before.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint in or after a fit, unless it is the last valid one in its folder.

        While the thread writes, the removal waits for the new file, and is left out if that can't be written.
        """
        if not self.removes:  # such as OnExceptionCheckpoint's in a validation
            return
        if self._thread is not None:
            self._removals.append(path)
            return
        target = local(path)
        if target.is_file() and not any(self._is_valid(other) for other in self._others(target)):
            warnings.warn(f"{target} is kept: it is the last valid checkpoint in its folder", stacklevel=2)
            return
        self.before.remove_checkpoint(path)
        shutil.rmtree(f"{target}{BESIDE}", ignore_errors=True)

    def teardown(self) -> None:
        """Wait for the thread that writes, and let other runs use the folders."""
        self.release()
        self.before.teardown()

    # --- what it consists of ---

    def claim(self, folder: Path) -> None:
        """Lock a folder for this run, once."""
        if folder in self._locks and not holds(self._locks[folder], folder):
            self._locks.pop(folder).close()
            warnings.warn(
                f"{folder} was deleted during the run, with all checkpoints in it: it is created anew", stacklevel=3
            )
        if folder not in self._locks:
            try:
                self._locks[folder] = lock(folder)
            except OSError as error:
                raise CheckpointError(
                    f"no checkpoint can be saved in {folder}: {error.strerror}; save to another folder, such as"
                    " ModelCheckpoint(dirpath=...)"
                ) from error

    def release(self) -> None:
        """Wait for the thread that writes, and let other runs use the folders."""
        try:
            with self._after_failure():
                self.wait()
        finally:
            self.holds_locks = False
            self._snapshots = Snapshots()  # frees their memory
            while self._locks:
                self._locks.popitem()[1].close()

    def wait(self) -> None:
        """Wait until the thread has written its checkpoint, and remove those that this one replaces.

        Raises:
            CheckpointError: it could not be written.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        removals, self._removals = self._removals, []
        if error is not None:
            raise error
        for path in removals:
            self.remove_checkpoint(path)

    @contextmanager
    def _after_failure(self) -> Iterator[None]:
        """After a fit has failed, warn of a checkpoint that can't be saved; the fit's error is the one to raise."""
        try:
            yield
        except CheckpointError as error:
            if not self.failure:
                raise
            warnings.warn(f"after {self.failure}: {error}", stacklevel=4)

    def _write_in_thread(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        try:
            self._write(checkpoint, path)
        except BaseException as error:
            self._error = error

    def _write(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        def record(written: Written) -> None:
            step, epoch = (int(checkpoint.get(name) or 0) for name in ("global_step", "epoch"))
            entry = Entry(path.name, step, epoch, *written, self.configuration, versions())
            append(path.parent, entry, durable=self.durable)

        write(checkpoint, path, record, sync=self.durable)
        self._verified[path] = _state_of(path)

    def _warn_of(self, left_out: Mapping[str, str]) -> None:
        if left_out and not self._left_out:
            names = listed(f"{name} ({kind})" for name, kind in left_out.items())
            warnings.warn(
                f"hyperparameters that weights_only=True can't load, or that have a secret of the environment, are left"
                f" out of checkpoints: {names}. A run resumes without them; pass them to load_from_checkpoint,"
                f" or don't keep them: self.save_hyperparameters(ignore={[*left_out]})",
                stacklevel=4,
            )
        self._left_out = self._left_out or bool(left_out)

    def _has_room(self, checkpoint: Mapping[str, Any]) -> bool:
        needed, room = tensor_bytes(checkpoint), host_room()
        if needed > room and not self._warned:
            self._warned = True
            warnings.warn(
                f"callback.safe_checkpoint.asynchronous: a copy of the checkpoint takes {format_bytes(needed)} of host"
                f" memory, and {format_bytes(room)} are available; it is written while training waits",
                stacklevel=3,
            )
        return needed <= room

    def _others(self, path: Path) -> list[Path]:
        names = dict.fromkeys(entry.file for entry in reversed(entries(path.parent)))
        return [path.parent / name for name in names if name != path.name]

    def _is_valid(self, path: Path) -> bool:
        return path.is_file() and (self._verified.get(path) == _state_of(path) or difference(path) is None)


def _state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def replaced_io(strategy: Any, make: Callable[[Any], SafeIO]) -> SafeIO:
    """Give a strategy a `SafeIO`, in place of Lightning's own reader and writer of files.

    Raises:
        CheckpointError: the strategy has another one, of the user's.
    """
    before = strategy.checkpoint_io
    if isinstance(before, SafeIO):
        before = before.before
    if type(before).__name__ != "TorchCheckpointIO":
        raise CheckpointError(
            f"callback.safe_checkpoint and plugins=[{type(before).__name__}(...)]: both write the checkpoints; drop the"
            " plugin (callback.safe_checkpoint.asynchronous=true saves in a thread), or write"
            " ~callback.safe_checkpoint"
        )
    strategy.checkpoint_io = made = make(before)
    return made
