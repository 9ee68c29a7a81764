"""The process between a sweep and its jobs: loads the application once, forks each job, and reports how it ended.

A forked job starts within milliseconds, with the application imported and nothing else run. CUDA does not survive a
fork: if an application uses CUDA or starts threads while it is imported, each of its jobs starts from a fresh
interpreter instead, and the log says so. When the command ends, for any reason, this process interrupts the jobs and
ends with them. If this process ends, the kernel kills the jobs.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from lightning_solo.atomic_files import write_json
from lightning_solo.errors import ConflictError, PresetError, SoloError, listed
from lightning_solo.processes import NVML, Child, environment, fork, start
from lightning_solo.sweeps.application import Application, load
from lightning_solo.sweeps.files import JobFiles, SweepFolder, cut_output, output_file, redirect_output
from lightning_solo.sweeps.job_process import JobRequest, run
from lightning_solo.sweeps.outcome import End
from lightning_solo.sweeps.ranks import run_ranks


def why_not_fork() -> str:
    """Return why this process can't be forked now, or an empty string if it can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the application starts CUDA while it is imported"
    with suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor).startswith("/dev/nvidia"):
                    return "the application opens the CUDA device while it is imported"
    with suppress(OSError):
        # native threads too: a fork has none of them and would wait for them
        others = len(os.listdir("/proc/self/task")) - 1
        if others > openblas_threads():
            names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
            return f"the application starts threads while it is imported ({names or f'{others}, native'})"
    return ""


def openblas_threads() -> int:
    """Return the number of threads that OpenBLAS started on import, by numpy and others; these survive a fork.

    OpenBLAS ends them before a fork and starts them again; each loaded copy has its own threads.
    """
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    settings = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"))
    threads = next((int(text) for text in settings if text.isdigit() and int(text)), len(os.sched_getaffinity(0)))
    return len(loaded) * (threads - 1)


def seed_afresh() -> None:
    """Seed the random numbers of a forked process; otherwise its siblings would draw the same ones."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


@dataclass
class Running:
    """A job's process."""

    request: JobRequest
    child: Child
    descriptor: int  # of the process; readable once it has ended
    started: float
    timed_out: bool = False
    interrupted: bool = False
    stopped_at: float | None = None  # time of the last signal to end, on the monotonic clock


class Server:
    """Starts jobs on demand, and ends with its command.

    Args:
        connection: connection to the command. The command first receives the reason why jobs can't be forked (empty if
            they can), or an exception if the application can't be loaded; then (number, `End`) of each job. It sends a
            `JobRequest` for each job, and None to interrupt the running ones.
        sweep: the folder of the sweep.
        application: the application of the jobs.
        lock: the descriptor of the sweep's lock file, which the command has locked.
    """

    def __init__(self, connection: Connection, sweep: SweepFolder, application: Application, lock: int) -> None:
        self.connection: Connection | None = connection
        self.sweep = sweep
        self.application = application
        self.lock = lock
        self.running: dict[int, Running] = {}
        self.task: Callable[[Any], Any] | None = None  # None: each job loads the application itself

    def serve(self) -> None:
        """Load the application, start jobs until the command ends, then wait for the running jobs."""
        self._load()
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
        if isinstance(received, JobRequest):
            try:
                self._start(received)
            except OSError as error:  # such as no process left
                self._send((received.number, End(1, seconds=0.0, not_started=str(error))))
        else:
            for job in self.running.values():
                job.interrupted = True
                self._stop(job, signal.SIGINT)

    def _send(self, message: object) -> None:
        if self.connection is not None:
            with suppress(OSError):
                self.connection.send(message)

    def _load(self) -> None:
        try:
            with environment({NVML: "1"}):
                self.task = load(self.application)
        except BaseException as error:
            text = str(error) if isinstance(error, SoloError) else "".join(traceback.format_exception(error))
            self._send(PresetError(text))
            self.connection = None
            return
        why = why_not_fork()
        if why:
            self.task = None
        gc.collect()
        gc.freeze()  # all jobs share the objects that exist now
        self._send(why)

    def _start(self, request: JobRequest) -> None:
        with output_file(request.folder).open("ab") as output, environment(request.variables):
            if self.task is None:
                child = start(f"{__name__}:run_job", self.application, request, self.sweep, output=output)
            else:
                _flush()
                child = fork(partial(self._run_forked, self.task, request, output.fileno()))
        self.running[request.number] = Running(request, child, os.pidfd_open(child.pid), time.monotonic())

    def _run_forked(self, task: Callable[[Any], Any], request: JobRequest, output: int, connection: Connection) -> int:
        """Run a job in a fork, without the server's state, and exit as a script does."""
        try:
            os.setsid()
            redirect_output(output)
            for descriptor in (output, self.lock, *(job.descriptor for job in self.running.values())):
                os.close(descriptor)
            for each in (connection, self.connection, *(job.child.connection for job in self.running.values())):
                if each is not None:
                    each.close()
            status = _run(lambda: task, request, self.sweep.job(request.number))
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            return status
        finally:
            with suppress(OSError, ValueError):
                _flush()

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
        job.child.signal(number)

    def _ended(self, job: Running) -> None:
        request, settings = job.request, job.request.settings
        exit_code = job.child.close()  # ends processes that the job has left running
        os.close(job.descriptor)
        del self.running[request.number]
        cut_output(output_file(request.folder), settings.output_mib * 2**20)
        end = End(
            exit_code,
            time.monotonic() - job.started,
            job.child.peak_bytes,
            job.child.oom_kills,
            settings.timeout_s if job.timed_out else None,
            job.interrupted,
        )
        with suppress(OSError):  # a full disk; the next command reads it if this one has ended
            write_json(self.sweep.job(request.number).end, {"attempt": request.attempt, **asdict(end)}, durable=False)
        self._send((request.number, end))


def serve(connection: Connection, sweep: SweepFolder, application: Application, lock: int) -> None:
    """Run the server of a sweep in this fresh interpreter."""
    # its jobs inherit this; a command in the background ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Server(connection, sweep, application, lock).serve()


def run_job(connection: Connection, application: Application, request: JobRequest, sweep: SweepFolder) -> NoReturn:
    """Run a job in this fresh interpreter, and exit."""
    connection.close()
    raise SystemExit(_run(partial(load, application), request, sweep.job(request.number)))


def _run(loaded: Callable[[], Callable[[Any], Any]], request: JobRequest, files: JobFiles) -> int:
    """Run a job's ranks, each of which loads its task function, and return the exit status."""

    def work(rank: int) -> int:
        seed_afresh()
        task = loaded()
        if any(os.environ.get(name) != value for name, value in request.variables.items()):
            task = partial(_refuse, listed(request.variables))
        return run(task, request, files, rank)

    status = run_ranks(request.devices, work)
    if status < 0:  # end as the rank that failed first, whose end may have been an error of the others
        files.result.unlink(missing_ok=True)
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _refuse(names: str, _: object) -> NoReturn:
    raise ConflictError(f"the application sets {names} while it is imported, which a sweep sets for each job; drop it")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
