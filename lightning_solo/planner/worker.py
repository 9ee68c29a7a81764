"""The process that makes plans, so that an abort there is an error here; requests and plans are sent over pipes."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle

from lightning_solo.errors import CapabilityError, PlanError, SoloError
from lightning_solo.planner.device import CPU
from lightning_solo.processes import end_with_parent, interpreter


@dataclass
class PlanRequest:
    """The arguments of a `Planner`, and the presets to plan, by name."""

    make: Callable[[], Any]
    batch: Any
    trainer: Mapping[str, Any]
    device: Any
    budget: int
    micro_batch: int | None
    presets: Mapping[str, Any]


class Worker:
    """A process that has imported torch and Lightning, and forks for each request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: Connection
        self._replies: Connection
        self._output: Any = None  # what the process prints
        self._lock = threading.Lock()  # one request at a time uses the pipes

    def start(self) -> None:
        """Start the process, which imports what it needs before there is a request; it ends with this one."""
        with self._lock:
            self._ensure_running()

    def answers(self, request: PlanRequest, timeout_s: float) -> Iterator[tuple[str, Any]]:
        """Yield (name, plan or exception) of each preset when it is done; ("", exception) where none can be planned.

        A preset at which the process dies gets an exception, and the others are requested again.

        Raises:
            PlanError: the time is over.
        """
        remaining = dict(request.presets)
        with self._lock:
            while remaining:
                for name, answer in self._answers_until_death(replace(request, presets=remaining), timeout_s):
                    remaining = {other: config for other, config in remaining.items() if name not in ("", other)}
                    yield name, answer

    def _answers_until_death(self, request: PlanRequest, timeout_s: float) -> Iterator[tuple[str, Any]]:
        payload = cloudpickle.dumps(request)
        pending = list(request.presets)
        self._ensure_running()
        deadline = time.monotonic() + timeout_s
        try:
            self._output.truncate(0)
            self._requests.send_bytes(payload)
            while True:
                if not self._replies.poll(max(deadline - time.monotonic(), 0)):
                    raise PlanError(
                        f"no plan after {timeout_s:g} s; is there a loop in training_step that waits for a number?"
                    )
                kind, *reply = self._reply()
                if kind == "done":
                    return
                if kind == "died":
                    message = f"the process that plans died of {_death(reply[0])}; it last said:\n{self._tail()}"
                    yield pending[0], PlanError(message)
                    return
                name, answer = reply
                if name in pending:
                    pending.remove(name)
                yield name, answer
        except BaseException:
            self.close()  # its other replies would be read as those to the next request
            raise

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._requests, self._replies, self._output):
                pipe.close()
            self._process = None

    def _ensure_running(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        stdin, self._requests = Pipe(duplex=False)
        self._replies, stdout = Pipe(duplex=False)
        with stdin, stdout:
            self._process = subprocess.Popen(
                interpreter("lightning_solo.planner.worker:serve"),
                stdin=stdin.fileno(),
                stdout=stdout.fileno(),
                stderr=self._output,
                start_new_session=True,
            )
        atexit.register(self.close)

    def _reply(self) -> Any:
        try:
            reply = self._replies.recv_bytes()
        except (EOFError, OSError):
            raise PlanError(f"the process that plans ended; it last said:\n{self._tail()}") from None
        return pickle.loads(reply)

    def _tail(self) -> str:
        self._output.seek(0)
        text: str = self._output.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-5:])


def serve() -> None:
    """Answer requests until the pipe is closed, each in a forked process."""
    requests, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a module prints is no reply
    end_with_parent()
    gc.disable()  # imports leave no garbage, and a third of their time would be spent looking for it
    import torch

    import lightning_solo.planner.planner  # noqa: F401 - torch and Lightning, once

    gc.freeze()  # later collections skip what was imported
    gc.enable()
    torch.set_num_threads(1)  # OpenMP's threads would not exist after a fork

    while True:
        try:
            payload = requests.recv_bytes()
        except (EOFError, OSError):
            return
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            status = 1
            try:
                _answer(payload, replies)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status:
            _send(replies, "died", status)


def _answer(payload: bytes, replies: Connection) -> None:
    from lightning_solo.planner.planner import Planner

    try:
        request: PlanRequest = cloudpickle.loads(payload)
        precisions = dict.fromkeys(config.precision for config in request.presets.values())
        checked = False
        planner = Planner(**{name: value for name, value in vars(request).items() if name != "presets"})
        for name, config in request.presets.items():
            try:
                if request.device.name == CPU and (reason := config.needs_cuda()):
                    raise CapabilityError(reason)
                answer: Any = planner.plan(name, config)
                checked = True
            except PlanError as error:
                answer = error
                if not checked:
                    planner.check_module(precisions)
                    checked = True
            except Exception as error:
                answer = _sendable(error)
            _send(replies, "plan", name, answer)
    except Exception as error:  # of the module, the batch or the request
        _send(replies, "plan", "", _sendable(error))
    _send(replies, "done")


def _sendable(error: Exception) -> SoloError:
    return error if isinstance(error, SoloError) else PlanError(f"{type(error).__name__}: {error}")


def _send(pipe: Connection, *message: Any) -> None:
    pipe.send_bytes(pickle.dumps(message))


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)} ({signal.strsignal(os.WTERMSIG(status))})"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


WORKER = Worker()
