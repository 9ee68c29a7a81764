"""Runs the jobs of a sweep, each in a fresh process; jobs that an earlier command ran are not run again."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

from lightning_solo.atomic_files import read_json, try_lock
from lightning_solo.errors import CapabilityError, CheckpointError, PresetError
from lightning_solo.sweeps import entry_points, results
from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.interrupts import Interrupts
from lightning_solo.sweeps.job_process import JobRequest
from lightning_solo.sweeps.jobs import Job, Settings, Try, check_folders, set_aside
from lightning_solo.sweeps.orphans import Orphans
from lightning_solo.sweeps.outcome import AGAIN, FINISHED, LOST, outcome
from lightning_solo.sweeps.results import Row
from lightning_solo.sweeps.server import interpreter

LOOK_S = 0.25
SERVERS = 3  # that may die under one sweep


class Sweep:
    """One command's work on one sweep's folder.

    Args:
        folder: where everything is written.
        application: what the jobs run.
        settings: how.
        tell: called with (event, job's number, details) at each event: "adopted", "kept", "started", "ended", "again",
            "anew", "spawning".
        look: called several times a second with the numbers of the jobs that run.
        wanted: called before a job is started; a job that is no longer wanted is left out, without a row.
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
        self.interrupts = Interrupts()
        self._full: tuple[Path, str] | None = None  # the file that could not be written, and why; no job starts then
        self._running: dict[int, Try] = {}
        self._opened: ExitStack | None = None
        self._connection: Connection | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder's lock, and the process that starts the jobs, from one `run` to the next.

        Raises:
            CheckpointError: another command works on this sweep.
        """
        if self._opened is not None:
            yield
            return
        with self.folder.lock(), self.interrupts.counted():
            self._wait_for_orphans()
            self.rows = {}
            try:
                with ExitStack() as self._opened:
                    yield
            finally:
                self._opened = self._connection = None

    def run(self, jobs: Sequence[Job]) -> list[Row]:
        """Run the jobs that have no result yet, and return a row for each job that was wanted.

        Raises:
            CheckpointError: another command works on this sweep, its results are of another version, or a row or a job
                could not be written.
            PresetError: the application can't be imported by another process; a job's folder leads out of the sweep.
            KeyboardInterrupt: after the running jobs were signalled and have ended.
        """
        check_folders(self.folder.path, jobs)
        with self.opened():
            self.interrupts.check()
            earlier = {row.number: row for row in results.read(self.folder.results)}
            waiting: deque[Try] = deque()
            for job in jobs:
                row = self._settled(job, earlier.get(job.number))
                if row is not None and self._stands(row):
                    self.rows[job.number] = row
                    self.tell("kept", job.number, row.status)
                else:
                    waiting.append(self._next(job, row))
            if any(self.wanted(one.job) for one in waiting):
                self._work(waiting)
            if self._full is not None:
                file, why = self._full
                raise CheckpointError(
                    f"{file}: {why}; make room there and give the same command again: it resumes with the jobs that"
                    " have not ended"
                )
            return [self.rows[job.number] for job in jobs if job.number in self.rows]

    # --- jobs of an earlier command ---

    def _wait_for_orphans(self) -> None:
        """Wait until no job of an earlier command lives.

        The process that started them enforces their limits and records their ends; where it is gone, `Orphans` does.
        """
        orphans = Orphans(self.folder, self.settings)
        with self.folder.server_lock.open("a") as file:
            announced = False
            while not try_lock(file.fileno()):
                running = [n for n in self.folder.jobs() if not self._has_ended(n)]
                for number in running:
                    if not announced:
                        self.tell("adopted", number, orphans.described(number))
                    orphans.watch(number)
                announced = True
                self.look(running)
                time.sleep(LOOK_S)
                self.interrupts.check()
        orphans.note_ends()

    def _has_ended(self, number: int) -> bool:
        files = self.folder.job(number)
        start = read_json(files.start)
        return start is None or files.end_of(start["attempt"]) is not None

    def _settled(self, job: Job, row: Row | None) -> Row | None:
        """Return the row of a job that ran with this configuration, which an earlier command may have left to write."""
        start = read_json(self.folder.job(job.number).start)
        if start is None or start["config_hash"] != job.config_hash:
            return None
        if row is None or row.attempt != start["attempt"]:
            row = self._row(job, self._end(job.number, start))
            self._write(row)
        return row

    def _stands(self, row: Row) -> bool:
        """Return whether a job need not run again."""
        if self.settings.rerun == "all" or row.status in AGAIN:
            return False
        if row.status == FINISHED:
            return True
        start = read_json(self.folder.job(row.number).start) or {}
        return self.settings.rerun == "never" and start.get("failures", 0) >= self.settings.retries

    def _next(self, job: Job, row: Row | None) -> Try:
        """Return the next try of a job; it resumes the last one where that has no result.

        Args:
            job: the job.
            row: of its last try, if that had this configuration.
        """
        start = read_json(self.folder.job(job.number).start)
        if start is None:
            return Try(job, 1, False)
        failures = 0
        if row is not None and self.settings.rerun == "never":
            failures = start.get("failures", 0) + (row.status not in (FINISHED, *AGAIN))
        return Try(job, start["attempt"] + 1, row is not None and row.status != FINISHED, failures)

    def _end(self, number: int, start: dict[str, Any]) -> dict[str, Any]:
        """Return how a job's process ended, as far as it is known."""
        files, attempt = self.folder.job(number), start["attempt"]
        if (end := files.end_of(attempt)) is not None:
            return end
        result = files.result_of(attempt)
        status, detail = (LOST, "") if result is None else outcome(int("error" in result), result)
        return {"attempt": attempt, "status": status, "detail": detail}

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
            died += 1  # it alone: its jobs live, and hold its lock
            self._wait_for_orphans()
            self._take_back(waiting)
            if died == SERVERS:
                raise CheckpointError(
                    f"{self.folder.path}: the process that starts the jobs died {died} times; its last words are in"
                    f" {self.folder.server_log}"
                )

    @contextmanager
    def _server(self) -> Iterator[Connection]:
        entry_points.announce(self.folder.entry_points)
        ours, theirs = socketpair()
        with self.folder.server_log.open("ab") as log, theirs:
            process = subprocess.Popen(
                interpreter("serve", str(self.folder.path.absolute()), str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        connection = Connection(ours.detach())
        try:
            self._import(connection)
            yield connection
        finally:
            connection.close()
            process.wait()

    def _import(self, server: Connection) -> None:
        try:
            server.send(("application", self.application))
            while not server.poll(LOOK_S):
                self.interrupts.check()
            what, value = server.recv()
        except (EOFError, ConnectionError):
            raise CheckpointError(
                "the process that starts the jobs died before the first; its last words are in"
                f" {self.folder.server_log}"
            ) from None
        if what == "failed":
            where = self.application.file or self.application.module
            raise PresetError(f"hydra/launcher=solo: a job's own process can't import {where}:\n{value}")
        if value:
            self.tell("spawning", None, value)

    def _serve(self, server: Connection, waiting: deque[Try]) -> bool:
        """Run jobs until all have ended; False when the server died.

        At a Ctrl-C the running jobs get one too, and none is started; at a second they are killed.
        """
        self._running, forwarded = {}, 0
        while waiting or self._running:
            while waiting and len(self._running) < self.settings.parallel and not self._stops():
                self._start(server, waiting.popleft())
            try:
                while forwarded < self.interrupts.count and self._running:
                    server.send(("interrupt", None))
                    forwarded += 1
                self.look(list(self._running))
                if self._running and server.poll(LOOK_S):
                    what, value = server.recv()
                    if what == "ended":
                        self._ended(waiting, *value)
                    elif what == "full":
                        self._cannot_start(*value)
            except (EOFError, ConnectionError):
                return False
            if not self._running:
                self.interrupts.check()
                if self._full is not None:
                    break
        return True

    def _stops(self) -> bool:
        """Return whether no further job is started."""
        return bool(self.interrupts.count) or self._full is not None

    def _start(self, server: Connection, one: Try) -> None:
        if not self.wanted(one.job):
            return
        if set_aside(one):
            self.tell("anew", one.job.number, "")
        request = self._request(one)
        self._running[one.job.number] = one
        with suppress(ConnectionError):  # `_serve` will see that the server is gone
            server.send(("run", request))
        self.tell("started", one.job.number, "")

    def _request(self, one: Try) -> JobRequest:
        job = one.job
        return JobRequest(
            number=job.number,
            attempt=one.attempt,
            resumes=one.resumes,
            failures=one.failures,
            overrides=job.overrides,
            folder=str(job.folder.absolute()),
            config_hash=job.config_hash,
            context=job.context(),
            settings=self.settings,
        )

    def _ended(self, waiting: deque[Try], number: int, end: dict[str, Any]) -> None:
        one = self._running.pop(number)
        row = self._row(one.job, end)
        if row.status not in (FINISHED, *AGAIN) and one.failures < self.settings.retries and not self._stops():
            self.tell("again", number, f"{row.status} {row.detail}".strip())
            waiting.appendleft(Try(one.job, one.attempt + 1, True, one.failures + 1))
            return
        self._write(row)
        self.rows[number] = row
        self.tell("ended", number, f"{row.status} {row.detail}".strip())

    def _cannot_start(self, number: int, why: str) -> None:
        del self._running[number]
        self._full = self.folder.job(number).path, why
        self.tell("ended", number, f"not started: {why}")

    def _take_back(self, waiting: deque[Try]) -> None:
        """Add the rows of the jobs that ended after their server died, and queue the others again."""
        for job, *_ in self._running.values():
            row = self._settled(job, None)
            if row is None or not self._stands(row):
                waiting.appendleft(self._next(job, row))
            else:
                self.rows[job.number] = row
                self.tell("ended", job.number, f"{row.status} {row.detail}".strip())

    def _row(self, job: Job, end: dict[str, Any]) -> Row:
        files = self.folder.job(job.number)
        start = read_json(files.start) or {}
        result, progress = files.result_of(end["attempt"]) or {}, read_json(files.progress) or {}
        detail = end["detail"]
        if "not_kept" in result:
            detail = f"{detail} returned a {result['not_kept']}, which is not kept".strip()
        if progress.get("pruned_at") is not None:
            detail = f"{detail} pruned at {progress['pruned_at']}".strip()
        return Row(
            number=job.number,
            overrides=job.overrides,
            status=end["status"],
            detail=detail,
            folder=str(job.folder),
            attempt=end["attempt"],
            returned=result.get("returned"),
            metrics=progress.get("metrics", {}),
            steps=progress.get("step"),
            seconds=end.get("seconds"),
            started=start.get("started"),
            peak_device_bytes=result.get("peak_device_bytes", progress.get("peak_device_bytes")),
            peak_host_bytes=end.get("peak_host_bytes"),
            config_hash=job.config_hash,
            hardware=result.get("device", f"{os.cpu_count()} CPU cores ({platform.machine()})"),
            versions=results.versions(),
        )

    def _write(self, row: Row) -> None:
        try:
            results.append(self.folder.results, row)
        except OSError as error:  # raised by `run` once the running jobs have ended
            self._full = self.folder.results, str(error)
