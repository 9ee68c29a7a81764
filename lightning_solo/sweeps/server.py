"""The process between a sweep and its jobs: imports the application once, forks each job, and writes how it ended.

It outlives its command. Killed in the middle of a job, a command leaves the job running and this process to note its
end; the same command, given again, waits for that and goes on. A forked job starts within milliseconds, from memory in
which nothing has run yet. CUDA can't be forked: an application that touches it while it is imported, or starts threads,
has its jobs started from a fresh interpreter each, and the log says so.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import pickle
import random
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

from lightning_solo.errors import SoloError
from lightning_solo.sweeps.application import Application, load
from lightning_solo.sweeps.files import (
    JobFiles,
    SweepFolder,
    keep_room,
    read_json,
    room_of,
    try_lock,
    write_in_room,
    write_json,
)
from lightning_solo.sweeps.job import Asked, run
from lightning_solo.sweeps.outcome import oom_kills, outcome

KEPT_OUTPUT = 2**20
"""Bytes of the output that stay when it is cut: the last ones."""
FULL = (errno.ENOSPC, errno.EDQUOT)
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass
class Running:
    """A job's process.

    Attributes:
        descriptor: of the process; readable once it has ended.
        stopped_at: when it was first asked to end, on the monotonic clock.
    """

    asked: Asked
    files: JobFiles
    pid: int
    descriptor: int
    started: float
    oom_kills: int
    timed_out: bool = False
    interrupted: bool = False
    stopped_at: float | None = None


class Server:
    """Starts jobs on demand, and goes when its command is gone and its jobs have ended."""

    def __init__(self, sweep: SweepFolder, connection: Connection, lock: int) -> None:
        self.sweep = sweep
        self.connection: Connection | None = connection
        self.lock = lock
        self.running: dict[int, Running] = {}
        self.task: Callable[..., Any] | None = None  # None: each job imports the application itself
        self.application: Application | None = None

    def serve(self) -> None:
        """Do what the command asks until it is gone, and see its jobs to their end."""
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
            except OSError as error:  # no process left, say
                log_exception()
                if error.errno in FULL:
                    self._tell("full", (value.number, str(error)))
                else:
                    self._tell("ended", (value.number, could_not_start(value, error)))
        elif what == "interrupt":
            for job in self.running.values():
                job.interrupted = True
                self._stop(job, signal.SIGINT)

    def _tell(self, what: str, value: Any) -> None:
        if self.connection is not None:
            with suppress(OSError):
                self.connection.send((what, value))

    def _load(self, application: Application) -> None:
        self.application = application
        set_before = os.environ.get(NVML)
        os.environ[NVML] = "1"  # or a look for a device while importing would start CUDA, which can't be forked
        try:
            self.task = load(application)
        except BaseException as error:
            log_exception()
            refused = isinstance(error, SoloError)
            self._tell("failed", str(error) if refused else "".join(traceback.format_exception(error)))
            self.connection = None
            return
        finally:
            if set_before is None:
                del os.environ[NVML]
            else:
                os.environ[NVML] = set_before
        why = why_not_fork()
        if why:
            self.task = None
        gc.collect()
        gc.freeze()  # what is there now is shared by all jobs
        self._tell("ready", why)

    def _start(self, asked: Asked) -> None:
        files = self.sweep.job(asked.number)
        for file in (files.result, files.end):
            keep_room(file)
        write_json(
            files.start,
            {
                "attempt": asked.attempt,
                "overrides": list(asked.overrides),
                "folder": asked.folder,
                "config_hash": asked.config_hash,
                "failures": asked.failures,
                "started": time.time(),
            },
        )
        files.clear()
        output = os.open(output_file(asked), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            pid = self._fork(asked, files, output) if self.task else self._spawn(asked, files, output)
        finally:
            os.close(output)
        with suppress(OSError):  # only a later command would ask, if this process were gone
            write_json(files.process, {"attempt": asked.attempt, "pid": pid}, durable=False)
        job = Running(asked, files, pid, os.pidfd_open(pid), time.monotonic(), oom_kills())
        self.running[asked.number] = job

    def _fork(self, asked: Asked, files: JobFiles, output: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._become(asked, files, output)
        return pid

    def _become(self, asked: Asked, files: JobFiles, output: int) -> NoReturn:
        """Be the job: nothing of the server's but its lock, which says that a job of the sweep lives."""
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background ignores it
            into(output)
            os.close(output)
            if self.connection is not None:
                self.connection.close()
            for job in self.running.values():
                os.close(job.descriptor)
            leave_to_this_process(self.lock)
            seed_afresh()
            assert self.task is not None
            status = run(self.task, asked, files)
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _spawn(self, asked: Asked, files: JobFiles, output: int) -> int:
        request = files.path / "asked.pickle"
        request.touch(mode=0o600)
        request.write_bytes(pickle.dumps((self.application, asked)))
        process = subprocess.Popen(
            interpreter("job", str(self.sweep.path), str(request), str(self.lock)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[self.lock],
        )
        process.returncode = 0  # it is waited for here
        return process.pid

    def _watch(self, job: Running) -> None:
        now, limit = time.monotonic(), job.asked.timeout_s
        if job.stopped_at is None and limit is not None and now - job.started > limit:
            job.timed_out = True
            self._stop(job, signal.SIGTERM)
        elif job.stopped_at is not None and now - job.stopped_at > job.asked.grace_s:
            self._stop(job, signal.SIGKILL)
        cut_output(output_file(job.asked), job.asked.output_bytes)

    def _stop(self, job: Running, number: signal.Signals) -> None:
        if job.stopped_at is not None:
            number = signal.SIGKILL  # asked for the second time
        job.stopped_at = time.monotonic()
        with suppress(ProcessLookupError):
            os.killpg(job.pid, number)

    def _ended(self, job: Running) -> None:
        _, wait_status, usage = os.wait4(job.pid, 0)
        os.close(job.descriptor)
        del self.running[job.asked.number]
        with suppress(ProcessLookupError, PermissionError):  # what the job has started and left behind
            os.killpg(job.pid, signal.SIGKILL)
        cut_output(output_file(job.asked), job.asked.output_bytes)
        exit_code = os.waitstatus_to_exitcode(wait_status)
        said = read_json(job.files.result)
        status, detail = outcome(
            exit_code,
            said if said and said.get("attempt") == job.asked.attempt else None,
            timed_out=job.timed_out,
            interrupted=job.interrupted,
            oom_kills=oom_kills() - job.oom_kills,
        )
        if status == "timed out":
            detail = f"after {job.asked.timeout_s:g} s (hydra.launcher.timeout_s), {detail}".removesuffix(", ")
        end = {
            "attempt": job.asked.attempt,
            "status": status,
            "detail": detail,
            "exit_code": exit_code,
            "seconds": time.monotonic() - job.started,
            "ended": time.time(),
            "peak_host_bytes": usage.ru_maxrss * 1024,
        }
        (job.files.path / "asked.pickle").unlink(missing_ok=True)
        room_of(job.files.result).unlink(missing_ok=True)  # of a job that did not come to say anything
        try:
            write_in_room(job.files.end, end)
        except OSError:  # the command is told all the same
            log_exception()
        self._tell("ended", (job.asked.number, end))


def log_exception() -> None:
    """Write the exception that is handled to this process's log, if there is room for it."""
    with suppress(OSError):
        traceback.print_exc()


def openblas_threads() -> int:
    """Return how many threads numpy and its like have started while they were imported: these survive a fork.

    OpenBLAS ends them before a fork and starts them again; each copy that is loaded has its own.
    """
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    told = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"))
    cores = next((int(text) for text in told if text.isdigit() and int(text)), len(os.sched_getaffinity(0)))
    return len(loaded) * (cores - 1)


def could_not_start(asked: Asked, error: OSError) -> dict[str, Any]:
    """Return the end of a job that never began."""
    return {
        "attempt": asked.attempt,
        "status": "failed",
        "detail": f"could not be started: {error}",
        "seconds": 0.0,
        "ended": time.time(),
    }


def why_not_fork() -> str:
    """Return why jobs can't be forked from this process as it is now; nothing if they can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the application starts CUDA while it is imported"
    with suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor).startswith("/dev/nvidia"):
                    return "the application opens the CUDA device while it is imported"
    with suppress(OSError):
        # Native ones too: a fork has none of them, and waits for them.
        others = len(os.listdir("/proc/self/task")) - 1
        if others > openblas_threads():
            names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
            return f"the application starts threads while it is imported ({names or f'{others}, native'})"
    return ""


def output_file(asked: Asked) -> Path:
    """Return where a job's output goes."""
    folder = Path(asked.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "output.log"


def cut_output(path: Path, most: int) -> None:
    """Keep the end of an output that has become larger than ``most`` bytes; what is written meanwhile may be lost."""
    try:
        if not most or path.stat().st_size <= most:
            return
        with path.open("rb+") as file:
            file.seek(-min(KEPT_OUTPUT, most // 2), os.SEEK_END)
            kept = file.read(min(KEPT_OUTPUT, most // 2))
            file.truncate(0)
        with path.open("ab") as file:
            file.write(b"... (the output was larger than hydra.launcher.output_mib; this is its end)\n" + kept)
    except OSError:
        return


def into(output: int) -> None:
    """Let what this process prints go to a file, and leave it nothing to read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)


def leave_to_this_process(lock: int) -> None:
    """Let what this process starts not hold the lock: it says that a job lives, not what a job has left."""
    os.set_inheritable(lock, False)
    os.register_at_fork(after_in_child=lambda: close_if_open(lock))


def close_if_open(descriptor: int) -> None:
    """Close a descriptor, if it is open."""
    with suppress(OSError):
        os.close(descriptor)


def seed_afresh() -> None:
    """Let a forked process draw random numbers of its own, as a fresh one would."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def interpreter(*arguments: str) -> list[str]:
    """Return the command of a fresh interpreter that finds what this one finds, and nothing else, and runs `main`."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from lightning_solo.sweeps.server import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


def run_job_here(sweep: SweepFolder, request: Path, lock: int) -> NoReturn:
    """Be a job in a fresh interpreter."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_to_this_process(lock)
    application, asked = pickle.loads(request.read_bytes())
    status = run(load(application), asked, sweep.job(asked.number))
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
