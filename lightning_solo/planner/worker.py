"""The process in which plans are made: an abort there is an error message here; it is fed by value, over pipes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import cloudpickle

from lightning_solo.errors import CapabilityError, PlanError
from lightning_solo.planner.device import CPU
from lightning_solo.planner.forks import end_with_parent
from lightning_solo.presets.conflicts import needs_cuda

_HEAD = struct.Struct("<Q")


@dataclass
class Request:
    """What is to be planned; as `planner.planner.Planner`, and the presets by name."""

    make: Callable[[], Any]
    batch: Any
    trainer: Mapping[str, Any]
    device: Any
    budget: int
    micro_batch: int | None
    allow: Sequence[str]
    presets: Mapping[str, Any]


class Worker:
    """A process that has imported torch and Lightning, and forks for each request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: Any = None
        self._lock = threading.Lock()  # one request at a time has the pipes

    def start(self) -> None:
        """Let the process begin to import what it needs, before there is a request; it ends with this one."""
        with self._lock:
            self._running()

    def answers(self, request: Request, timeout_s: float) -> Iterator[tuple[str, Any]]:
        """Yield (name, plan or exception) of each preset as it is done.

        A preset at which the process dies has that for its answer, and the others are asked for again.

        Raises:
            PlanError: it took longer.
        """
        left = dict(request.presets)
        with self._lock:
            while left:
                for name, found in self._some(replace(request, presets=left), timeout_s):
                    left = {other: config for other, config in left.items() if other != name} if name else {}
                    yield name, found

    def _some(self, request: Request, timeout_s: float) -> Iterator[tuple[str, Any]]:
        """Yield answers until all are there, or one is that the process died of."""
        payload = cloudpickle.dumps(request)
        waiting = list(request.presets)
        process = self._running()
        deadline = time.monotonic() + timeout_s
        try:
            assert process.stdin is not None
            self._said.truncate(0)
            unsent = memoryview(_HEAD.pack(len(payload)) + payload)
            while unsent:
                unsent = unsent[process.stdin.write(unsent) :]
            while True:
                kind, *rest = self._read(process, deadline, timeout_s)
                if kind == "done":
                    return
                if kind == "died":
                    said = f"the process that plans died of {_death(rest[0])}; it last said:\n{self._tail()}"
                    yield waiting[0], PlanError(said)
                    return
                if rest[0] in waiting:
                    waiting.remove(rest[0])
                yield rest[0], rest[1]
        except BaseException:
            self.close()  # whatever it still has to say is about a request that nobody waits for
            raise

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._said):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            # the folders first: this package may be found by one of them
            code = f"import sys; sys.path[:] = {sys.path!r}; from lightning_solo.planner.worker import serve; serve()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
                bufsize=0,  # what is in a buffer select() doesn't see
            )
            atexit.register(self.close)
        return self._process

    def _read(self, process: subprocess.Popen[bytes], deadline: float, timeout_s: float) -> Any:
        assert process.stdout is not None
        left = deadline - time.monotonic()
        if not select.select([process.stdout], [], [], max(left, 0))[0]:
            raise PlanError(f"no plan after {timeout_s:g} s; is there a loop in training_step that waits for a number?")
        reply = _frame(process.stdout)
        if reply is None:
            raise PlanError(f"the process that plans ended; it last said:\n{self._tail()}")
        return pickle.loads(reply)

    def _tail(self) -> str:
        self._said.seek(0)
        text: str = self._said.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-5:])


def serve() -> None:
    """Answer requests until the pipe is closed, each in a process of its own."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a module prints is not an answer
    end_with_parent()
    gc.disable()  # of what imports make nothing is garbage, and looking for it takes a third of their time
    import torch

    import lightning_solo.planner.planner  # noqa: F401 - torch and Lightning, once

    gc.freeze()  # nor is it looked at later
    gc.enable()
    torch.set_num_threads(1)  # OpenMP's threads would not be there after a fork

    while (payload := _frame(requests)) is not None:
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
            _write(replies, ("died", status))


def _answer(payload: bytes, replies: BinaryIO) -> None:
    from lightning_solo.planner.planner import Planner

    try:
        request: Request = cloudpickle.loads(payload)
        planner = Planner(
            request.make,
            request.batch,
            request.trainer,
            request.device,
            request.budget,
            request.micro_batch,
            request.allow,
        )
        for name, config in request.presets.items():
            try:
                if request.device.name == CPU and (reason := needs_cuda(config)):
                    raise CapabilityError(reason)
                found: Any = planner.plan(name, config)
            except Exception as error:
                found = error
            _write(replies, ("plan", name, _sendable(found)))
    except Exception as error:
        for name in request.presets if "request" in locals() else ("",):
            _write(replies, ("plan", name, _sendable(error)))
    _write(replies, ("done",))


def _sendable(found: Any) -> Any:
    from lightning_solo.errors import SoloError

    if isinstance(found, Exception) and not isinstance(found, SoloError):
        return PlanError(f"{type(found).__name__}: {found}")
    return found


def _frame(pipe: Any) -> bytes | None:
    head = _exactly(pipe, _HEAD.size)
    return None if head is None else _exactly(pipe, _HEAD.unpack(head)[0])


def _exactly(pipe: Any, size: int) -> bytes | None:
    parts = b""
    while len(parts) < size:
        part = pipe.read(size - len(parts))
        if not part:
            return None
        parts += part
    return parts


def _write(pipe: BinaryIO, message: Any) -> None:
    body = pickle.dumps(message)
    pipe.write(_HEAD.pack(len(body)) + body)
    pipe.flush()


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)} ({signal.strsignal(os.WTERMSIG(status))})"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


WORKER = Worker()
