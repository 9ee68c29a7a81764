"""Runs the jobs of a sweep, each in a fresh process; finished jobs of an earlier command are not run again."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import read_json, write_json
from lightning_solo.errors import CapabilityError, CheckpointError, PresetError, listed
from lightning_solo.machine import HOST_SHARE, host_memory, versions
from lightning_solo.processes import Child, ProcessError, environment, start
from lightning_solo.signals import caught_signals
from lightning_solo.sweeps import results
from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.gpus import place, variables_of
from lightning_solo.sweeps.job_process import JobRequest
from lightning_solo.sweeps.jobs import Job, Settings, Try, check_folders
from lightning_solo.sweeps.outcome import FINISHED, INTERRUPTED, OUT_OF_DEVICE_MEMORY, End, outcome
from lightning_solo.sweeps.results import Row
from lightning_solo.sweeps.server import serve

LOOK_S = 0.25


def row_or_try(job: Job, start: Mapping[str, Any], row: Row, settings: Settings) -> Row | Try:
    """Return the row of an unchanged job's last attempt if it counts, else the job's next try.

    Args:
        job: a job that an earlier command has started.
        start: the record of its last start.
        row: of the attempt that was started last.
        settings: the launcher's settings.
    """
    attempt, rerun = start["attempt"] + 1, settings.rerun
    failed = row.status not in (FINISHED, INTERRUPTED)
    failures = start.get("failures", 0) + failed if rerun == "never" else 0
    if rerun != "all" and (row.status == FINISHED or (failed and failures > settings.retries)):
        return row
    if row.status == FINISHED:
        return Try(job, attempt, failures, anew=f"hydra.launcher.rerun={rerun}")
    return Try(job, attempt, failures, seconds=row.seconds or 0.0, alone=start.get("alone", False))


def changed(job: Job, start: Mapping[str, Any], settings: Settings, code: Mapping[str, str]) -> str:
    """Return what has changed since a job was started; empty if its earlier attempts count."""
    if start.get("config_hash") != job.config_hash:
        return "its configuration has changed"
    before = start.get("code")
    if settings.rerun == "failed" or before == code:
        return ""
    if not isinstance(before, Mapping):  # an older version didn't store it by file
        return "another version of lightning-solo ran it"
    files = sorted(file for file in {*before, *code} if before.get(file) != code.get(file))
    return f"{listed(files)} changed"


@dataclass(eq=False, repr=False)
class Sweep:
    """Runs jobs in the folder of a sweep, for one command.

    Args:
        folder: the sweep's folder.
        application: the application of the jobs.
        settings: the launcher's settings.
        tell: called with (event, job's number, details); events are "kept", "started", "ended", "again", "anew" and
            "spawning".
        look: called several times a second with the numbers of the running jobs.
        wanted: whether a job is still wanted when its turn comes; an unwanted one gets no row.
        gpus: GPUs to share out, see `gpus.place`.
    """

    folder: SweepFolder
    application: Application
    settings: Settings
    tell: Callable[[str, int | None, str], None] = lambda *_: None
    look: Callable[[Sequence[int]], None] = lambda _: None
    wanted: Callable[[Job], bool] = lambda _: True
    gpus: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not hasattr(os, "pidfd_open"):
            raise CapabilityError("hydra/launcher=solo needs Linux; write hydra/launcher=basic")
        self.rows: dict[int, Row] = {}
        self._listed: dict[int, tuple[str, ...]] = {}
        self._signals: list[int] = []  # signals to end that this process received
        self._full: tuple[Path, str] | None = None  # a file that could not be written, and why; then no job starts
        self._opened: ExitStack | None = None
        self._lock = -1
        self._server: Child | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder's lock and the process that starts the jobs, from one `run` to the next.

        Raises:
            CheckpointError: another command works on this sweep.
        """
        if self._opened is not None:
            yield
            return
        with caught_signals() as self._signals, self.folder.lock(self._check_signals) as self._lock:
            self.rows, self._listed = {}, {}
            try:
                with ExitStack() as self._opened:
                    yield
            finally:
                self._opened = self._server = None

    def run(self, jobs: Sequence[Job]) -> list[Row]:
        """Run the jobs that have no result yet, and return a row for each job that was wanted.

        Raises:
            CheckpointError: another command works on this sweep, its results are of another version, a file could not
                be written, or the process that starts the jobs died.
            PresetError: another process can't load the application, or a job's folder is outside the sweep's.
            KeyboardInterrupt: after the running jobs were signalled and have ended.
        """
        check_folders(self.folder.path, jobs)
        with self.opened():
            self._check_signals()
            earlier = {row.number: row for row in results.read(self.folder.results)}
            self._listed |= {job.number: job.overrides for job in jobs}
            with suppress(OSError):  # on a full disk the first job fails with a message
                write_json(self.folder.listed, self._listed, durable=False)
            waiting: deque[Try] = deque()
            for job in jobs:
                kept = self._row_or_try(job, earlier.get(job.number))
                if isinstance(kept, Row):
                    self.rows[job.number] = kept
                    self.tell("kept", job.number, kept.status)
                else:
                    waiting.append(kept)
            if any(self.wanted(one.job) for one in waiting):
                self._work(waiting)
            if self._full is not None:
                file, why = self._full
                raise CheckpointError(
                    f"{file}: {why}; make room there and give the same command again: it resumes with the jobs that"
                    " have not ended"
                )
            return [self.rows[job.number] for job in jobs if job.number in self.rows]

    def _row_or_try(self, job: Job, row: Row | None) -> Row | Try:
        """Return a job's row if an earlier command finished it, else its next try."""
        files = self.folder.job(job.number)
        start = read_json(files.start)
        if start is None:
            return Try(job, 1)
        if anew := changed(job, start, self.settings, self.application.code):
            return Try(job, start["attempt"] + 1, anew=anew)
        if row is None or row.attempt != start["attempt"]:  # the command ended before it wrote the row
            gpus = tuple(filter(None, start.get("gpu", "").split(",")))
            one = Try(job, start["attempt"], start.get("failures", 0), seconds=start.get("seconds", 0.0), gpus=gpus)
            row = self._row(one, files.end_of(one.attempt, start.get("started", time.time())))
            if row.status == OUT_OF_DEVICE_MEMORY and start.get("shared"):
                return Try(job, one.attempt + 1, one.failures, seconds=row.seconds or 0.0, alone=True)
            if row.status != INTERRUPTED:
                self._write(row)
        return row_or_try(job, start, row, self.settings)

    def _work(self, waiting: deque[Try]) -> None:
        """Run jobs until all have ended.

        Ctrl-C interrupts the running jobs and starts no others; a second Ctrl-C kills them.
        """
        running: dict[int, Try] = {}
        forwarded = 0
        try:
            server = self._server or self._serve()
            while waiting or running:
                while waiting and len(running) < (self.settings.parallel or 1) and not self._stops():
                    if self.wanted(waiting[0].job):
                        if (reason := self._unplanned(waiting[0].job)) is not None:
                            self._ended(waiting, waiting.popleft(), End(1, not_started=reason))
                            continue
                        gpus = place(waiting[0], running.values(), self.gpus, self.settings)
                        if gpus is None:  # until a running job ends; the next ones don't overtake
                            break
                        self._start(server, waiting[0]._replace(gpus=gpus), running)
                    waiting.popleft()
                while forwarded < len(self._signals) and running:
                    server.send(None)
                    forwarded += 1
                self.look(list(running))
                if running and server.connection.poll(LOOK_S):
                    number, end = server.receive()
                    self._ended(waiting, running.pop(number), end)
                if not running:
                    self._check_signals()
                    if self._full is not None:
                        return
        except ProcessError as error:
            raise CheckpointError(
                f"{self.folder.path}: the process that starts the jobs died of {error}; its last output is in"
                f" {self.folder.server_log}; the same command resumes"
            ) from None

    def _serve(self) -> Child:
        """Start the process that starts the jobs, and wait until it has loaded the application."""
        assert self._opened is not None
        folder = SweepFolder(self.folder.path.absolute())
        with self.folder.server_log.open("ab") as log, environment(self._shares()):
            server = start(
                f"{serve.__module__}:serve", folder, self.application, self._lock,
                output=log, inherited=[self._lock], killed_with_parent=False,
            )  # fmt: skip
        self._opened.callback(server.wait)
        self._opened.callback(server.connection.close)  # which ends it, after its jobs
        while not server.connection.poll(LOOK_S):
            self._check_signals()
        try:
            why_not_forked = server.receive()
        except PresetError as error:
            where = self.application.file or self.application.module
            raise PresetError(f"hydra/launcher=solo: a job's own process can't load {where}:\n{error}") from None
        if why_not_forked:
            self.tell("spawning", None, why_not_forked)
        self._server = server
        return server

    def _shares(self) -> dict[str, str]:
        """Return environment variables that share out the host's memory and cores between jobs that run at once."""
        parallel = self.settings.parallel or 1
        if parallel == 1:
            return {}
        threads = max(len(os.sched_getaffinity(0)) // parallel, 1)
        given = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
        return {HOST_SHARE: str(host_memory()[1] // parallel), "OMP_NUM_THREADS": str(threads), **given}

    def _unplanned(self, job: Job) -> str | None:
        """Return why the application can't plan a job that is packed by its plan; None if it can."""
        try:
            job.planned_bytes()
        except Exception as error:  # of any kind, of the user's function
            return f"planned_bytes raised {type(error).__name__}: {error}"
        return None

    def _check_signals(self) -> None:
        if self._signals:
            raise KeyboardInterrupt

    def _stops(self) -> bool:
        """Return whether no further job is to be started."""
        return bool(self._signals) or self._full is not None

    def _start(self, server: Child, one: Try, running: dict[int, Try]) -> None:
        job, gpu = one.job, ",".join(one.gpus)
        beside = [number for number, other in running.items() if set(one.gpus) & set(other.gpus)]
        files, folder = self.folder.job(job.number), str(job.folder.absolute())
        try:
            if one.attempt > 1 and not one.resumes and job.folder.exists():
                former = job.folder.rename(job.folder.with_name(f"{job.folder.name}.attempt-{one.attempt - 1}"))
                self.tell("anew", job.number, f"{one.anew}; its former folder is now {former.name}")
            start = {"attempt": one.attempt, "failures": one.failures, "started": time.time(), "folder": folder}
            start |= {"gpu": gpu, "shared": self.settings.jobs_per_gpu != 1 and not one.alone}
            start |= {"alone": one.alone, "seconds": one.seconds}
            what = {"overrides": job.overrides, "config_hash": job.config_hash, "code": self.application.code}
            write_json(files.start, {**start, **what})
            if not one.resumes:
                files.former.unlink(missing_ok=True)
            elif files.progress.exists():
                files.progress.replace(files.former)
            for file in (files.result, files.progress, files.end):  # of an earlier attempt
                file.unlink(missing_ok=True)
        except OSError as error:
            self._full = files.path, str(error)
            self.tell("ended", job.number, f"not started: {error}")
            return
        request = JobRequest(
            job.number,
            one.attempt,
            one.resumes,
            folder,
            job.argument(),
            self.settings,
            variables_of(one.gpus),
            job.devices,
        )
        server.send(request)
        running |= {number: running[number]._replace(shared=True) for number in beside}
        running[job.number] = one._replace(shared=bool(beside))
        how = [f"on GPU {gpu}"] if gpu else []
        how += [f"attempt {one.attempt}, in its folder as it was left"] if one.resumes else []
        self.tell("started", job.number, ", ".join(how))

    def _ended(self, waiting: deque[Try], one: Try, end: End) -> None:
        row = self._row(one, end)
        crowded = one.shared and row.status == OUT_OF_DEVICE_MEMORY
        failed = row.status not in (FINISHED, INTERRUPTED)
        again = (crowded or (failed and one.failures < self.settings.retries)) and not self._stops()
        detail = f"{row.status} {row.detail}".strip()
        detail += f" (beside other jobs on GPU {row.gpu})" if crowded else ""
        self.tell("again" if again else "ended", row.number, detail)
        if again:
            failures = one.failures + (not crowded)
            waiting.appendleft(
                Try(one.job, one.attempt + 1, failures, seconds=row.seconds or 0.0, alone=crowded or one.alone)
            )
        elif not crowded:  # else the next command runs it alone
            self._write(row)
            self.rows[row.number] = row

    def _row(self, one: Try, end: End) -> Row:
        job, attempt = one.job, one.attempt
        files = self.folder.job(job.number)
        start = read_json(files.start) or {}
        result, progress = files.result_of(attempt), read_json(files.progress) or {}
        status, detail = outcome(end, result)
        result = result or {}
        if "not_kept" in result:
            detail = f"{detail} returned a {result['not_kept']}, which is not kept".strip()
        if progress.get("pruned_at") is not None:
            detail = f"{detail} pruned at {progress['pruned_at']}".strip()
        return Row(
            number=job.number,
            overrides=job.overrides,
            status=status,
            detail=detail,
            folder=str(job.folder),
            attempt=attempt,
            returned=result.get("returned"),
            metrics=progress.get("metrics", {}),
            steps=progress.get("step"),
            seconds=None if end.seconds is None else one.seconds + end.seconds,
            started=start.get("started"),
            peak_device_bytes=result.get("peak_device_bytes", progress.get("peak_device_bytes")),
            peak_host_bytes=end.peak_host_bytes,
            gpu=",".join(one.gpus),
            config_hash=job.config_hash,
            hardware=result.get("device", f"{os.cpu_count()} CPU cores ({platform.machine()})"),
            versions=versions(),
        )

    def _write(self, row: Row) -> None:
        try:
            results.append(self.folder.results, row)
        except OSError as error:  # raised by `run` once the running jobs have ended
            self._full = self.folder.results, str(error)
