"""Runs the jobs of a sweep, each in a fresh process; what an earlier command has begun or done is not done again."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any, NamedTuple

from lightning_solo.errors import CapabilityError, CheckpointError, PresetError
from lightning_solo.sweeps import entry_points, results
from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.files import SweepFolder, read_json, try_lock
from lightning_solo.sweeps.job import Asked
from lightning_solo.sweeps.outcome import AGAIN, FINISHED, LOST
from lightning_solo.sweeps.results import Row

RERUN = ("never", "failed", "all")
LOOK_S = 0.25
SERVERS = 3  # that may die under one sweep


@dataclass(frozen=True)
class Settings:
    """What `hydra.launcher` may be told.

    Attributes:
        parallel: jobs at a time.
        timeout_s: seconds that a job may take; None for any.
        grace_s: seconds between asking a job to end and ending it.
        retries: how often a job that failed is started again.
        rerun: which jobs of an earlier command are run again: never, failed, all.
        output_mib: of a job's output that are kept; 0 for all.
        tail_lines: of a failed job's output that are shown.
    """

    parallel: int = 1
    timeout_s: float | None = None
    grace_s: float = 10.0
    retries: int = 0
    rerun: str = "never"
    output_mib: int = 64
    tail_lines: int = 15

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("retries", 0), ("grace_s", 0), ("output_mib", 0), ("tail_lines", 0)):
            if getattr(self, name) < least:
                raise PresetError(f"hydra.launcher.{name}={getattr(self, name)}: must be {least} or more")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise PresetError(f"hydra.launcher.timeout_s={self.timeout_s}: must be positive, or null for no limit")
        if self.rerun not in RERUN:
            raise PresetError(f"hydra.launcher.rerun={self.rerun!r}: must be one of {', '.join(RERUN)}")


@dataclass(frozen=True)
class Job:
    """A job to be run; `context` makes what Hydra needs, when it is needed."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config_hash: str
    context: Callable[[], bytes]


class Try(NamedTuple):
    """A job and how many times it will have been started; ``resumes`` what an earlier try has begun."""

    job: Job
    attempt: int
    resumes: bool


class Sweep:
    """One command's work on one sweep's folder.

    Args:
        folder: where everything is written.
        application: what the jobs run.
        settings: how.
        tell: called with (event, job's number, details) as things happen: "adopted", "kept", "started", "ended",
            "again", "waiting", "spawning".
        look: called several times a second, with the numbers of the jobs that run.
        wanted: asked before a job is started; one that is no longer wanted is left out, without a row.
    """

    def __init__(
        self,
        folder: SweepFolder,
        application: Application,
        settings: Settings,
        *,
        tell: Callable[[str, int | None, str], None] = lambda *_: None,
        look: Callable[[Sequence[int]], None] = lambda _: None,
        wanted: Callable[[Job], bool] = lambda _: True,
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise CapabilityError("hydra/launcher=solo needs Linux; write hydra/launcher=basic")
        self.folder = folder
        self.application = application
        self.settings = settings
        self.tell = tell
        self.look = look
        self.wanted = wanted
        self.rows: dict[int, Row] = {}
        self._unwritten: OSError | None = None
        self._opened: ExitStack | None = None
        self._connection: Connection | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the folder, and the process that starts the jobs, from one `run` to the next.

        Raises:
            CheckpointError: another command works on this sweep.
        """
        if self._opened is not None:
            yield
            return
        with self.folder.lock():
            self._wait_for_orphans()
            self.rows = {}
            try:
                with ExitStack() as self._opened:
                    yield
            finally:
                self._opened = self._connection = None

    def run(self, jobs: Sequence[Job]) -> list[Row]:
        """Run what is not there yet, and return a row for each job that was wanted.

        Raises:
            CheckpointError: another command works on this sweep, or its results are of another version.
            PresetError: the application can't be imported by another process; a job's folder leads out of the sweep.
            KeyboardInterrupt: after the running jobs were asked to end, and have.
        """
        check_folders(self.folder.path, jobs)
        with self.opened():
            earlier = {row.number: row for row in results.read(self.folder.results)}
            waiting: deque[Try] = deque()
            for job in jobs:
                row = self._settled(job, earlier.get(job.number))
                if row is None:
                    waiting.append(self._next(job, earlier.get(job.number)))
                else:
                    self.rows[job.number] = row
                    self.tell("kept", job.number, row.status)
            if any(self.wanted(one.job) for one in waiting):
                self._work(waiting)
            return [self.rows[job.number] for job in jobs if job.number in self.rows]

    # --- what an earlier command has left ---

    def _wait_for_orphans(self) -> None:
        """Wait until no job of an earlier command lives; the process that started them notes their ends."""
        with self.folder.server_lock.open("a") as file:
            told = False
            while not try_lock(file.fileno()):
                running = [n for n in self.folder.jobs() if not self._has_ended(n)]
                if not told:
                    for number in running:
                        self.tell("adopted", number, "")
                    told = True
                self.look(running)
                time.sleep(LOOK_S)

    def _has_ended(self, number: int) -> bool:
        files = self.folder.job(number)
        start, end = read_json(files.start), read_json(files.end)
        return start is None or (end is not None and end["attempt"] == start["attempt"])

    def _settled(self, job: Job, row: Row | None) -> Row | None:
        """Return the row of a job that need not run again; writes the one that an earlier command did not come to."""
        start = read_json(self.folder.job(job.number).start)
        if start is None or start["config_hash"] != job.config_hash or self.settings.rerun == "all":
            return None
        if row is None or row.attempt != start["attempt"]:
            row = self._row(job, self._end(job.number, start))
            self._write(row)
        failed = row.status != FINISHED
        if row.status in AGAIN or (failed and self.settings.rerun == "failed"):
            return None
        if failed and row.attempt <= self.settings.retries:
            return None
        return row

    def _next(self, job: Job, row: Row | None) -> Try:
        """Return the next try of a job that is to run; it goes on where the last one did not come to a result."""
        start = read_json(self.folder.job(job.number).start)
        if start is None:
            return Try(job, 1, False)
        same = start["config_hash"] == job.config_hash
        finished = row is not None and row.status == FINISHED
        return Try(job, start["attempt"] + 1, same and not finished)

    def _end(self, number: int, start: dict[str, Any]) -> dict[str, Any]:
        """Return how a job's process ended, as far as it is known."""
        files = self.folder.job(number)
        end = read_json(files.end)
        if end is not None and end["attempt"] == start["attempt"]:
            return end
        said = read_json(files.result)
        done = said is not None and said.get("attempt") == start["attempt"] and "error" not in said
        return {"attempt": start["attempt"], "status": FINISHED if done else LOST, "detail": ""}

    # --- the work ---

    def _work(self, waiting: deque[Try]) -> None:
        died = 0
        while waiting:
            assert self._opened is not None
            if self._connection is None:
                self._connection = self._opened.enter_context(self._server())
            if self._serve(self._connection, waiting):
                break
            self._connection = None
            self._opened.close()
            died += 1  # it alone: its jobs live on, and hold its lock
            self._wait_for_orphans()
            self._take_back(waiting)
            if died == SERVERS:
                raise CheckpointError(
                    f"{self.folder.path}: the process that starts the jobs died {died} times; its last words are in"
                    f" {self.folder.server_log}"
                )
        if self._unwritten is not None:
            raise CheckpointError(
                f"{self.folder.results}: {self._unwritten}; jobs ran that have no row there, make room and give the"
                " same command again: they are not run again"
            )

    @contextmanager
    def _server(self) -> Iterator[Connection]:
        entry_points.announce(self.folder.entry_points)
        ours, theirs = socketpair()
        command = [sys.executable, "-m", "lightning_solo.sweeps.server", "serve", str(self.folder.path.absolute())]
        with self.folder.server_log.open("ab") as log, theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=with_package_on_path(),
            )
        connection = Connection(ours.detach())
        try:
            connection.send(("application", self.application))
            what, value = connection.recv()
            if what == "failed":
                where = self.application.file or self.application.module
                raise PresetError(f"hydra/launcher=solo: a job's own process can't import {where}:\n{value}")
            if value:
                self.tell("spawning", None, value)
            yield connection
        except EOFError:
            raise CheckpointError(
                f"the process that starts the jobs died before the first; its last words are in"
                f" {self.folder.server_log}"
            ) from None
        finally:
            connection.close()
            process.wait()

    def _serve(self, server: Connection, waiting: deque[Try]) -> bool:
        """Run jobs until all have ended; False when the server died."""
        self._running: dict[int, Try] = {}
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.settings.parallel:
                    one = waiting.popleft()
                    if not self.wanted(one.job):
                        continue
                    self._running[one.job.number] = one
                    set_aside(one)
                    server.send(("run", self._asked(one)))
                    self.tell("started", one.job.number, "")
                self.look(list(self._running))
                if server.poll(LOOK_S):
                    what, value = server.recv()
                    if what == "ended":
                        self._ended(value, waiting)
        except (EOFError, OSError):
            return False
        except KeyboardInterrupt:
            self._interrupt(server)
            raise
        return True

    def _interrupt(self, server: Connection) -> None:
        """Ask the jobs to end, as Ctrl-C does, and see that they do; at a second Ctrl-C they are ended."""
        nothing: deque[Try] = deque()
        while self._running:
            with suppress(EOFError, OSError):
                server.send(("interrupt", None))
                while self._running:
                    try:
                        self.look(list(self._running))
                        if server.poll(LOOK_S):
                            what, value = server.recv()
                            if what == "ended":
                                self._ended(value, nothing)
                    except KeyboardInterrupt:
                        server.send(("interrupt", None))
            break

    def _asked(self, one: Try) -> Asked:
        s, job = self.settings, one.job
        return Asked(
            number=job.number,
            attempt=one.attempt,
            resumes=one.resumes,
            overrides=job.overrides,
            folder=str(job.folder.absolute()),
            config_hash=job.config_hash,
            context=job.context(),
            timeout_s=s.timeout_s,
            grace_s=s.grace_s,
            output_bytes=s.output_mib * 2**20,
        )

    def _ended(self, told: tuple[int, dict[str, Any]], waiting: deque[Try]) -> None:
        number, end = told
        job, attempt, _ = self._running.pop(number)
        row = self._row(job, end)
        if row.status not in (FINISHED, *AGAIN) and attempt <= self.settings.retries:
            self.tell("again", number, f"{row.status} {row.detail}".strip())
            waiting.appendleft(Try(job, attempt + 1, True))
            return
        self._write(row)
        self.rows[number] = row
        self.tell("ended", number, f"{row.status} {row.detail}".strip())

    def _take_back(self, waiting: deque[Try]) -> None:
        """Settle the jobs whose server died under them: those that came to an end, and those that did not."""
        for job, *_ in self._running.values():
            row = self._settled(job, None)
            if row is None:
                waiting.appendleft(self._next(job, None))
            else:
                self.rows[job.number] = row
                self.tell("ended", job.number, f"{row.status} {row.detail}".strip())

    def _row(self, job: Job, end: dict[str, Any]) -> Row:
        files = self.folder.job(job.number)
        start = read_json(files.start) or {}
        said, progress = (read_json(file) or {} for file in (files.result, files.progress))
        if said.get("attempt") != end["attempt"]:
            said = {}
        detail = end["detail"]
        if "not_kept" in said:
            detail = f"{detail} returned a {said['not_kept']}, which is not kept".strip()
        if progress.get("pruned_at") is not None:
            detail = f"{detail} pruned at {progress['pruned_at']}".strip()
        return Row(
            number=job.number,
            overrides=job.overrides,
            status=end["status"],
            detail=detail,
            folder=str(job.folder),
            attempt=end["attempt"],
            returned=said.get("returned"),
            metrics=progress.get("metrics", {}),
            steps=progress.get("step"),
            seconds=end.get("seconds"),
            started=start.get("started"),
            peak_device_bytes=said.get("peak_device_bytes", progress.get("peak_device_bytes")),
            peak_host_bytes=end.get("peak_host_bytes"),
            config_hash=job.config_hash,
            hardware=said.get("device", f"{os.cpu_count()} CPU cores ({platform.machine()})"),
            versions=results.versions(),
        )

    def _write(self, row: Row) -> None:
        try:
            results.append(self.folder.results, row)
        except OSError as error:  # the jobs go on; it is said at the end
            self._unwritten = error


def check_folders(sweep: Path, jobs: Sequence[Job]) -> None:
    """Refuse jobs' folders that lead out of the sweep's, or that two jobs share.

    Raises:
        PresetError: names the jobs.
    """
    root, seen = sweep.resolve(), dict[Path, int]()
    for job in jobs:
        folder = job.folder.resolve()
        if root not in folder.parents:
            raise PresetError(
                f"hydra.sweep.subdir: job {job.number} would write to {job.folder}, which is not below {sweep}; write"
                " 'hydra.sweep.subdir=${hydra.job.num}'"
            )
        if folder in seen:
            raise PresetError(
                f"hydra.sweep.subdir: jobs {seen[folder]} and {job.number} would both write to {job.folder}; write"
                " 'hydra.sweep.subdir=${hydra.job.num}'"
            )
        seen[folder] = job.number


def set_aside(one: Try) -> None:
    """Rename the folder of a job that starts anew though it ran before: with another configuration, or by `rerun`."""
    if one.attempt > 1 and not one.resumes and one.job.folder.exists():
        one.job.folder.rename(one.job.folder.with_name(f"{one.job.folder.name}.attempt-{one.attempt - 1}"))


def with_package_on_path() -> dict[str, str]:
    """Return the environment for a process that finds this package where this one did."""
    root = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, path]) if path else root}


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Take SIGTERM for a Ctrl-C, so that jobs are asked to end and results are kept."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("SIGTERM")

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
