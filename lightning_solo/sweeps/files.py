"""The files of a sweep: its lock, its results, and the state and output of each job.

```
<sweep>/
├── results.jsonl        a row per job (results.py)
├── .sweep/
│   ├── lock             held by the command that runs the sweep, and by the process that starts its jobs
│   ├── server.log       what that process printed: its imports, or why they failed
│   ├── listed.json      overrides of the last command's jobs, by number; written before the first job starts
│   ├── pruning.json     settings of pruning for the jobs of a search that prunes
│   └── jobs/7/
│       ├── start.json       attempt, configuration and folder; written by the command before the job starts
│       ├── progress.json    step, loss and memory during training; written by the observer that joins the job's Trainer
│       ├── former.json      progress of the attempt that this one resumes
│       ├── result.json      what the job reports at its end
│       └── end.json         how its process ended; written by the process that starts the jobs
└── 7/output.log         what job 7 printed; the folder is named by `hydra.sweep.subdir`
```
Each of these JSON files is complete or absent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import link_outwards, read_json, try_lock
from lightning_solo.errors import CheckpointError
from lightning_solo.processes import is_running
from lightning_solo.sweeps.outcome import End

OUTPUT = "output.log"
KEPT_BYTES = 2**20
"""Bytes at the end of the output that are kept when it is cut."""


def output_file(folder: str) -> Path:
    """Return the path of a job's output, and create its folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder, OUTPUT)


def cut_output(path: Path, most_bytes: int) -> None:
    """Keep the end of an output longer than ``most_bytes`` (0: no limit); lines written meanwhile may be lost."""
    try:
        if not most_bytes or path.stat().st_size <= most_bytes:
            return
        kept_bytes = min(KEPT_BYTES, most_bytes // 2)
        with path.open("rb+") as file:
            file.seek(-kept_bytes, os.SEEK_END)
            end = file.read(kept_bytes)
            file.seek(0)
            file.write(b"... (the output was larger than hydra.launcher.output_mib; this is its end)\n" + end)
            file.truncate()  # last, so that what the job writes from then on stands behind it
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


STATE = ".sweep"
RESULTS = "results.jsonl"


class JobFiles:
    """The files about one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = path / "start.json"
        self.progress = path / "progress.json"
        self.former = path / "former.json"
        self.result = path / "result.json"
        self.end = path / "end.json"

    def result_of(self, attempt: int) -> dict[str, Any] | None:
        """Return the result that this attempt wrote; None where it wrote none."""
        return self._of_attempt(self.result, attempt)

    def end_of(self, attempt: int, started: float) -> End:
        """Return the end of an attempt's process, also where the process that starts the jobs was killed with it.

        Then its time ends with its last progress or result.
        """
        if (end := self._of_attempt(self.end, attempt)) is not None:
            return End(**{name: value for name, value in end.items() if name != "attempt"})
        result = self.result_of(attempt)
        signs = [file.stat().st_mtime for file in (self.progress, self.result) if file.exists()]
        seconds = max(max(signs, default=started) - started, 0.0)
        return End(int("error" in (result or {})), seconds, interrupted=result is None)

    @staticmethod
    def _of_attempt(file: Path, attempt: int) -> dict[str, Any] | None:
        written = read_json(file)
        return written if written is not None and written.get("attempt") == attempt else None


class SweepFolder:
    """The folder of one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / STATE
        self.results = path / RESULTS
        self.server_log = self.state / "server.log"
        self.listed = self.state / "listed.json"
        self.pruning = self.state / "pruning.json"

    def job(self, number: int) -> JobFiles:
        """Return the files of a job."""
        return JobFiles(self.state / "jobs" / str(number))

    def jobs(self) -> list[int]:
        """Return the numbers of all jobs that were started or listed, in order."""
        started = {int(path.name) for path in (self.state / "jobs").glob("*") if path.name.isdigit()}
        return sorted(started | {int(number) for number in read_json(self.listed) or {}})

    @contextmanager
    def lock(self, look: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Hold the sweep's lock, and yield the number of the locked file.

        The kernel releases the lock when this process and those that inherited the file have ended. If the former
        command was killed, this waits for the end of its jobs.

        Raises:
            CheckpointError: another command works on the sweep; names its process. Or its folder, the folder of a job
                or a file of ours is a link to elsewhere.
        """
        if (link := link_outwards(self.path, "*") or link_outwards(self.state)) is not None:
            raise CheckpointError(
                f"{link} is a link to {link.resolve()}, and a sweep writes into its own folder only; remove it, or give"
                " another name: run=..., or in an application of your own hydra.sweep.dir=..."
            )
        self.state.mkdir(parents=True, exist_ok=True)
        path = self.state / "lock"
        with path.open("a") as file:
            while not try_lock(file.fileno()):
                command = path.read_text()
                if command and is_running(command):
                    raise CheckpointError(
                        f"{self.path}: process {command} works on this sweep; wait for it, end it, or give another"
                        " name: run=..., or in an application of your own hydra.sweep.dir=..."
                    )
                look()
                time.sleep(0.05)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield file.fileno()
