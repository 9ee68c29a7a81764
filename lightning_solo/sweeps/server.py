"""The process between a sweep and its jobs: imports the application once, forks each job, and records how it ended.

It outlives its command. If a command is killed in the middle of a job, the job keeps running and this process records
its end; the same command, run again, waits for that and resumes. A forked job starts within milliseconds, from memory
in which nothing has run yet. CUDA does not survive a fork: if an application uses CUDA or starts threads while it is
imported, each of its jobs starts from a fresh interpreter instead, and the log says so.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from lightning_solo.atomic_files import try_lock, write_json
from lightning_solo.errors import SoloError
from lightning_solo.sweeps.application import Application, load
from lightning_solo.sweeps.files import JobFiles, SweepFolder, keep_room, room_of, write_in_room
from lightning_solo.sweeps.forking import leave_to_this_process, seed_afresh, why_not_fork
from lightning_solo.sweeps.job_process import JobRequest, run
from lightning_solo.sweeps.outcome import oom_kills, outcome
from lightning_solo.sweeps.output import cut_output, output_file, redirect_output

FULL = (errno.ENOSPC, errno.EDQUOT)
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass
class Running:
    """A job's process.

    Attributes:
        descriptor: of the process; readable once it has ended.
        stopped_at: when it was last signalled to end, on the monotonic clock.
    """

    request: JobRequest
    files: JobFiles
    pid: int
    descriptor: int
    started: float
    oom_kills: int
    timed_out: bool = False
    interrupted: bool = False
    stopped_at: float | None = None


class Server:
    """Starts jobs on demand, and exits when its command is gone and its jobs have ended."""

    def __init__(self, sweep: SweepFolder, connection: Connection, lock: int) -> None:
        self.sweep = sweep
        self.connection: Connection | None = connection
        self.lock = lock
        self.running: dict[int, Running] = {}
        self.task: Callable[..., Any] | None = None  # None: each job imports the application itself
        self.application: Application | None = None

    def serve(self) -> None:
        """Serve the command until it is gone, and its jobs until they have ended."""
        while self.connection is not None or self.running:
            watched: list[Any] = [job.descriptor for job in self.running.values()]
            if self.connection is not None:
                watched.append(self.connection)
            ready = wait(watched, timeout=0.5 if self.running else None)
            for job in [job for job in self.running.values() if job.descriptor in ready]:
                self._ended(job)
            if self.connection in ready:
                self._read()
            for job in self.running.values():
                self._watch(job)

    def _read(self) -> None:
        assert self.connection is not None
        try:
            what, value = self.connection.recv()
        except (EOFError, OSError):
            self.connection.close()
            self.connection = None
            return
        if what == "application":
            self._load(value)
        elif what == "run":
            try:
                self._start(value)
            except OSError as error:  # such as no process left
                log_exception()
                if error.errno in FULL:
                    self._send("full", (value.number, str(error)))
                else:
                    self._send("ended", (value.number, could_not_start(value, error)))
        elif what == "interrupt":
            for job in self.running.values():
                job.interrupted = True
                self._stop(job, signal.SIGINT)

    def _send(self, what: str, value: Any) -> None:
        if self.connection is not None:
            with suppress(OSError):
                self.connection.send((what, value))

    def _load(self, application: Application) -> None:
        self.application = application
        before = os.environ.get(NVML)
        os.environ[NVML] = "1"  # else a search for a device during the import starts CUDA, which can't be forked
        try:
            self.task = load(application)
        except BaseException as error:
            log_exception()
            refused = isinstance(error, SoloError)
            self._send("failed", str(error) if refused else "".join(traceback.format_exception(error)))
            self.connection = None
            return
        finally:
            if before is None:
                del os.environ[NVML]
            else:
                os.environ[NVML] = before
        why = why_not_fork()
        if why:
            self.task = None
        gc.collect()
        gc.freeze()  # the objects of now are shared by all jobs
        self._send("ready", why)

    def _start(self, request: JobRequest) -> None:
        files = self.sweep.job(request.number)
        for file in (files.result, files.end):
            keep_room(file)
        write_json(
            files.start,
            {
                "attempt": request.attempt,
                "overrides": list(request.overrides),
                "folder": request.folder,
                "config_hash": request.config_hash,
                "failures": request.failures,
                "started": time.time(),
            },
        )
        files.clear()
        output = os.open(output_file(request.folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            pid = self._fork(request, files, output) if self.task else self._spawn(request, files, output)
        finally:
            os.close(output)
        with suppress(OSError):  # only a later command reads it, where this process is gone
            write_json(files.process, {"attempt": request.attempt, "pid": pid}, durable=False)
        job = Running(request, files, pid, os.pidfd_open(pid), time.monotonic(), oom_kills())
        self.running[request.number] = job

    def _fork(self, request: JobRequest, files: JobFiles, output: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._become(request, files, output)
        return pid

    def _become(self, request: JobRequest, files: JobFiles, output: int) -> NoReturn:
        """Turn a fork into the job, which keeps nothing of the server but its lock: a job of the sweep lives."""
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background ignores it
            redirect_output(output)
            os.close(output)
            if self.connection is not None:
                self.connection.close()
            for job in self.running.values():
                os.close(job.descriptor)
            leave_to_this_process(self.lock)
            seed_afresh()
            assert self.task is not None
            status = run(self.task, request, files)
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _spawn(self, request: JobRequest, files: JobFiles, output: int) -> int:
        files.request.touch(mode=0o600)
        files.request.write_bytes(pickle.dumps((self.application, request)))
        process = subprocess.Popen(
            interpreter("job", str(self.sweep.path), str(files.request), str(self.lock)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[self.lock],
        )
        process.returncode = 0  # `_ended` waits for it
        return process.pid

    def _watch(self, job: Running) -> None:
        now, limit = time.monotonic(), job.request.settings.timeout_s
        if job.stopped_at is None and limit is not None and now - job.started > limit:
            job.timed_out = True
            self._stop(job, signal.SIGTERM)
        elif job.stopped_at is not None and now - job.stopped_at > job.request.settings.grace_s:
            self._stop(job, signal.SIGKILL)
        cut_output(output_file(job.request.folder), job.request.settings.output_mib * 2**20)

    def _stop(self, job: Running, number: signal.Signals) -> None:
        if job.stopped_at is not None:
            number = signal.SIGKILL  # it was signalled before
        job.stopped_at = time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(job.pid, number)

    def _ended(self, job: Running) -> None:
        _, wait_status, usage = os.wait4(job.pid, 0)
        os.close(job.descriptor)
        del self.running[job.request.number]
        with suppress(ProcessLookupError, PermissionError):  # processes that the job started and left
            os.killpg(job.pid, signal.SIGKILL)
        cut_output(output_file(job.request.folder), job.request.settings.output_mib * 2**20)
        exit_code = os.waitstatus_to_exitcode(wait_status)
        status, detail = outcome(
            exit_code,
            job.files.result_of(job.request.attempt),
            timed_out=job.timed_out,
            interrupted=job.interrupted,
            oom_kills=oom_kills() - job.oom_kills,
        )
        if status == "timed out":
            limit = f"after {job.request.settings.timeout_s:g} s (hydra.launcher.timeout_s)"
            detail = f"{limit}, {detail}".removesuffix(", ")
        end = {
            "attempt": job.request.attempt,
            "status": status,
            "detail": detail,
            "exit_code": exit_code,
            "seconds": time.monotonic() - job.started,
            "ended": time.time(),
            "peak_host_bytes": usage.ru_maxrss * 1024,
        }
        job.files.request.unlink(missing_ok=True)
        room_of(job.files.result).unlink(missing_ok=True)  # of a job that wrote no result
        try:
            write_in_room(job.files.end, end)
        except OSError:  # the command gets it all the same
            log_exception()
        self._send("ended", (job.request.number, end))


def log_exception() -> None:
    """Write the exception being handled to this process's log, if there is room for it."""
    with suppress(OSError):
        traceback.print_exc()


def could_not_start(request: JobRequest, error: OSError) -> dict[str, Any]:
    """Return the end of a job that never began."""
    return {
        "attempt": request.attempt,
        "status": "failed",
        "detail": f"could not be started: {error}",
        "seconds": 0.0,
        "ended": time.time(),
    }


def interpreter(*arguments: str) -> list[str]:
    """Return the command of a fresh interpreter with the same `sys.path`, which runs `main`."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from lightning_solo.sweeps.server import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


def run_job_here(sweep: SweepFolder, file: Path, lock: int) -> NoReturn:
    """Run the job of a request's file in this fresh interpreter, and exit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_to_this_process(lock)
    application, request = pickle.loads(file.read_bytes())
    status = run(load(application), request, sweep.job(request.number))
    raise SystemExit(status)


def main(arguments: list[str]) -> None:
    """``serve <sweep's folder> <descriptor of the connection>``, or ``job <folder> <request> <lock>``."""
    what, folder, third, *more = arguments
    sweep = SweepFolder(Path(folder))
    if what == "job":
        run_job_here(sweep, Path(third), int(more[0]))
    lock = os.open(sweep.server_lock, os.O_RDWR | os.O_CREAT, 0o644)
    if not try_lock(lock):
        raise SystemExit("another process starts the jobs of this sweep")
    Server(sweep, Connection(int(third)), lock).serve()
