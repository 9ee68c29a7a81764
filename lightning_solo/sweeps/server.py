"""The process between a sweep and its jobs: loads the application once, forks each job, and reports how it ended.

A forked job starts within milliseconds, from memory in which nothing has run yet. CUDA does not survive a fork: if an
application uses CUDA or starts threads while it is imported, each of its jobs starts from a fresh interpreter instead,
and the log says so. If the command ends, for whatever reason, this process interrupts the jobs and ends with them; if
this process ends, the kernel kills them.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from lightning_solo.errors import SoloError
from lightning_solo.processes import NVML, end_with_parent, environment, interpreter
from lightning_solo.sweeps.application import Application, load
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.forking import seed_afresh, why_not_fork
from lightning_solo.sweeps.job_process import JobRequest, run
from lightning_solo.sweeps.outcome import oom_kills, outcome
from lightning_solo.sweeps.output import cut_output, output_file, redirect_output


@dataclass(frozen=True)
class End:
    """The end of a job's process; ``peak_host_bytes`` is resident memory of the job's largest process."""

    status: str
    detail: str
    seconds: float | None = None
    peak_host_bytes: int | None = None


@dataclass
class Running:
    """A job's process.

    Attributes:
        descriptor: of the process; readable once it has ended.
        stopped_at: time of the last signal to end, on the monotonic clock.
    """

    request: JobRequest
    pid: int
    descriptor: int
    started: float
    oom_kills: int
    timed_out: bool = False
    interrupted: bool = False
    stopped_at: float | None = None


class Server:
    """Starts jobs on demand, and ends with its command.

    Args:
        sweep: of the jobs.
        connection: to the command. It sends an `Application`, then a `JobRequest` for each job, and None to interrupt
            the running ones. It receives ("ready", why not forked) or ("failed", why), then (number, `End`).
        lock: the sweep's, locked by the command.
    """

    def __init__(self, sweep: SweepFolder, connection: Connection, lock: int) -> None:
        self.sweep = sweep
        self.connection: Connection | None = connection
        self.lock = lock
        self.running: dict[int, Running] = {}
        self.task: Callable[[Any], Any] | None = None  # None: each job loads the application itself
        self.application: Application | None = None

    def serve(self) -> None:
        """Serve the command until it is gone, and the jobs until they have ended."""
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
            received = self.connection.recv()
        except (EOFError, OSError):
            self.connection = received = None
        if isinstance(received, Application):
            self._load(received)
        elif isinstance(received, JobRequest):
            try:
                self._start(received)
            except OSError as error:  # such as no process left
                self._send((received.number, End("failed", f"could not be started: {error}", seconds=0.0)))
        else:
            for job in self.running.values():
                job.interrupted = True
                self._stop(job, signal.SIGINT)

    def _send(self, message: tuple[Any, Any]) -> None:
        if self.connection is not None:
            with suppress(OSError):
                self.connection.send(message)

    def _load(self, application: Application) -> None:
        self.application = application
        try:
            with environment({NVML: "1"}):
                self.task = load(application)
        except BaseException as error:
            text = str(error) if isinstance(error, SoloError) else "".join(traceback.format_exception(error))
            self._send(("failed", text))
            self.connection = None
            return
        why = why_not_fork()
        if why:
            self.task = None
        gc.collect()
        gc.freeze()  # all jobs share the objects that exist now
        self._send(("ready", why))

    def _start(self, request: JobRequest) -> None:
        with output_file(request.folder).open("ab") as output:
            pid = (self._fork if self.task else self._spawn)(request, output.fileno())
        self.running[request.number] = Running(request, pid, os.pidfd_open(pid), time.monotonic(), oom_kills())

    def _fork(self, request: JobRequest, output: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if not pid:
            self._become(request, output, server)
        return pid

    def _become(self, request: JobRequest, output: int, server: int) -> NoReturn:
        """Turn a fork into the job, without any state of the server."""
        status = 1
        try:
            end_with_parent(server)
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background ignores it
            redirect_output(output)
            for descriptor in (output, self.lock, *(job.descriptor for job in self.running.values())):
                os.close(descriptor)
            if self.connection is not None:
                self.connection.close()
            seed_afresh()
            assert self.task is not None
            status = run(self.task, request, self.sweep.job(request.number))
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _spawn(self, request: JobRequest, output: int) -> int:
        with tempfile.TemporaryFile() as file:
            pickle.dump((self.application, request), file)
            file.flush()
            file.seek(0)
            command = interpreter(f"{__name__}:run_job", str(self.sweep.path), str(os.getpid()))
            process = subprocess.Popen(command, stdin=file, stdout=output, stderr=output, start_new_session=True)
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
            number = signal.SIGKILL  # second signal
        job.stopped_at = time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(job.pid, number)

    def _ended(self, job: Running) -> None:
        request, settings = job.request, job.request.settings
        _, wait_status, usage = os.wait4(job.pid, 0)
        os.close(job.descriptor)
        del self.running[request.number]
        with suppress(ProcessLookupError, PermissionError):  # processes that the job started and left behind
            os.killpg(job.pid, signal.SIGKILL)
        cut_output(output_file(request.folder), settings.output_mib * 2**20)
        files = self.sweep.job(request.number)
        result = files.result_of(request.attempt)
        if self.connection is None and "error" in (result or {}):
            files.result.unlink()  # it failed because of the interrupt, so this is not its result
        status, detail = outcome(
            os.waitstatus_to_exitcode(wait_status),
            result,
            timed_out=job.timed_out,
            interrupted=job.interrupted,
            oom_kills=oom_kills() - job.oom_kills,
        )
        if status == "timed out":
            detail = f"after {settings.timeout_s:g} s (hydra.launcher.timeout_s), {detail}".removesuffix(", ")
        seconds = time.monotonic() - job.started
        self._send((request.number, End(status, detail, seconds, usage.ru_maxrss * 1024)))


def serve(folder: str, connection: str, lock: str) -> None:
    """Run the server of a sweep's folder in this fresh interpreter, given the numbers of two open files."""
    for descriptor in (connection, lock):
        os.set_inheritable(int(descriptor), False)
    Server(SweepFolder(Path(folder)), Connection(int(connection)), int(lock)).serve()


def run_job(folder: str, server: str) -> NoReturn:
    """Run the job whose request is on standard input in this fresh interpreter, and exit."""
    end_with_parent(int(server))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    application, request = pickle.load(sys.stdin.buffer)
    redirect_output(1)
    raise SystemExit(run(load(application), request, SweepFolder(Path(folder)).job(request.number)))
