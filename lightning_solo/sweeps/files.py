"""The files of a sweep: who works in it, and what each job was asked, has done and came to.

```
<sweep>/
├── results.jsonl        a row per job (results.py)
├── .sweep/
│   ├── lock             held by the command that runs the sweep
│   ├── server.lock      held by the process that started the jobs, and by each job, while they live
│   ├── server.log
│   └── jobs/7/          start.json, process.json, progress.json, result.json (the job's own word), end.json (how its
│                        process ended)
└── 7/output.log         what job 7 printed; the folder is named by `hydra.sweep.subdir`
```
A JSON file is whole or not there: it is written beside its place and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_solo.errors import CheckpointError

STATE = ".sweep"
ROOM = 2**16
"""Bytes set aside for each of a job's last words and its process's: a few hundred, and what was returned."""


def write_json(path: Path, data: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write a file that is whole at any moment; ``durable``: also after the power went."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def keep_room(path: Path) -> None:
    """Set aside the space that a file will need, so that a disk that is full by then does not lose it.

    Raises:
        OSError: it is full now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with room_of(path).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, ROOM)
    except OSError:
        room_of(path).unlink(missing_ok=True)
        raise


def room_of(path: Path) -> Path:
    """Return the file that holds the space for another one."""
    return path.with_name(f".room-{path.name}")


def write_in_room(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file as :func:`write_json` does, on a full disk into the space that :func:`keep_room` has set aside.

    Raises:
        OSError: nor is there enough of that.
    """
    try:
        write_json(path, data)
    except OSError:
        with room_of(path).open("rb+") as file:
            file.write(json.dumps(data).encode())
            file.truncate()
            os.fsync(file.fileno())
        os.replace(room_of(path), path)
    room_of(path).unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what :func:`write_json` wrote, or None where there is nothing, or nothing whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class JobFiles:
    """What is known of one job."""

    path: Path

    @property
    def start(self) -> Path:
        """Its attempt, overrides and folder; written by the process that forks it, before the fork."""
        return self.path / "start.json"

    @property
    def process(self) -> Path:
        """The id of its process; written by the one that forks it, right after the fork."""
        return self.path / "process.json"

    @property
    def progress(self) -> Path:
        """Step, loss and memory while it trains; written by the observer that joins its Trainer."""
        return self.path / "progress.json"

    @property
    def result(self) -> Path:
        """What the job itself says at its end."""
        return self.path / "result.json"

    @property
    def end(self) -> Path:
        """How its process ended; written by the process that forked it."""
        return self.path / "end.json"

    def clear(self) -> None:
        """Remove what an earlier attempt left; the start of the new one overwrites the old one's."""
        for file in (self.end, self.result, self.progress, self.process):
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one sweep."""

    path: Path

    @property
    def state(self) -> Path:
        """What belongs to the sweep itself, beside the jobs' folders."""
        return self.path / STATE

    @property
    def results(self) -> Path:
        """The rows."""
        return self.path / "results.jsonl"

    @property
    def server_lock(self) -> Path:
        """Held while a process lives that may start, or is, a job of this sweep."""
        return self.state / "server.lock"

    @property
    def entry_points(self) -> Path:
        """What lets Lightning ask the observer for callbacks, in jobs alone."""
        return self.state / "entry_points"

    @property
    def server_log(self) -> Path:
        """What the process between sweep and jobs printed: its imports, or why they failed."""
        return self.state / "server.log"

    @property
    def pruning(self) -> Path:
        """What a search tells its jobs about pruning, where it prunes."""
        return self.state / "pruning.json"

    def job(self, number: int) -> JobFiles:
        """Return the files of a job."""
        return JobFiles(self.state / "jobs" / str(number))

    def jobs(self) -> list[int]:
        """Return the numbers of the jobs that were started once, in order."""
        return sorted(int(path.name) for path in (self.state / "jobs").glob("*") if path.name.isdigit())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only command that works on this sweep; the kernel gives the lock back however that ends.

        Raises:
            CheckpointError: another one does; names its process.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        with (self.state / "lock").open("a+") as file:
            if not try_lock(file.fileno()):
                file.seek(0)
                raise CheckpointError(
                    f"{self.path}: process {file.read().strip() or 'unknown'} works on this sweep; wait for it, end it,"
                    " or give another name: run=..., or in an application of your own hydra.sweep.dir=..."
                )
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def try_lock(handle: int) -> bool:
    """Lock an open file if nobody else has; tell whether it is ours now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
