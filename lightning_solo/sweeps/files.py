"""The files of a sweep: its lock, and what is known about each of its jobs.

```
<sweep>/
├── results.jsonl        a row per job (results.py)
├── .sweep/
│   ├── lock             held by the command that runs the sweep
│   ├── server.lock      held by the process that started the jobs, and by each job, while they live
│   ├── server.log
│   └── jobs/7/          start.json, process.json, progress.json, result.json, end.json
└── 7/output.log         what job 7 printed; the folder is named by `hydra.sweep.subdir`
```
Each of these JSON files is complete or absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import read_json, try_lock, write_json
from lightning_solo.errors import CheckpointError

STATE = ".sweep"
ROOM = 2**16
"""Bytes set aside for each of result.json and end.json: a few hundred, and the value that was returned."""


def keep_room(path: Path) -> None:
    """Set aside the space that a file will need, so that it can be written even if the disk is full by then.

    Raises:
        OSError: the disk is full now.
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
    """Write a file by `write_json`; on a full disk, into the space that `keep_room` has set aside.

    Raises:
        OSError: there is not enough of that space either.
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


class JobFiles:
    """The files about one job.

    Attributes:
        start: attempt, overrides and folder; written by the process that starts the job, before it does.
        process: id of the job's process; written by the same one, right after the start.
        progress: step, loss and memory during training; written by the observer that joins the job's Trainer.
        result: what the job itself reports at its end.
        end: how the job's process ended; written by the process that started it.
        request: the request, pickled, while a fresh interpreter runs it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = path / "start.json"
        self.process = path / "process.json"
        self.progress = path / "progress.json"
        self.result = path / "result.json"
        self.end = path / "end.json"
        self.request = path / "request.pickle"

    def result_of(self, attempt: int) -> dict[str, Any] | None:
        """Return the result that this attempt wrote; None where it wrote none."""
        result = read_json(self.result)
        return result if result is not None and result.get("attempt") == attempt else None

    def end_of(self, attempt: int) -> dict[str, Any] | None:
        """Return how the process of this attempt ended; None where that is not known."""
        end = read_json(self.end)
        return end if end is not None and end["attempt"] == attempt else None

    def clear(self) -> None:
        """Remove the files of an earlier attempt; its start is overwritten by that of the next one."""
        for file in (self.end, self.result, self.progress, self.process):
            file.unlink(missing_ok=True)


class SweepFolder:
    """The folder of one sweep.

    Attributes:
        state: files about the sweep itself, beside the folders of its jobs.
        results: a row per job.
        server_lock: held while a process lives that may start, or is, a job of this sweep.
        server_log: what the process that starts the jobs printed: its imports, or why they failed.
        entry_points: the package by which Lightning finds the observer, in jobs alone.
        pruning: settings of pruning for the jobs of a search that prunes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / STATE
        self.results = path / "results.jsonl"
        self.server_lock = self.state / "server.lock"
        self.server_log = self.state / "server.log"
        self.entry_points = self.state / "entry_points"
        self.pruning = self.state / "pruning.json"

    def job(self, number: int) -> JobFiles:
        """Return the files of a job."""
        return JobFiles(self.state / "jobs" / str(number))

    def jobs(self) -> list[int]:
        """Return the numbers of the jobs that were ever started, in order."""
        return sorted(int(path.name) for path in (self.state / "jobs").glob("*") if path.name.isdigit())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only command that works on this sweep; the kernel releases the lock however the command ends.

        Raises:
            CheckpointError: another command works on it; names its process.
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
