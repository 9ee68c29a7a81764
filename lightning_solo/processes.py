"""Processes: this one's environment, and its children, which are forks or fresh interpreters.

A process and its child exchange pickled messages by a `Connection`. An exception that the child sends is raised by
`Child.receive`. A child is killed when its parent ends, for any reason.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

from lightning_solo.errors import SoloError

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""How torch looks for a CUDA device; with it the search doesn't start CUDA, which can't be forked."""
SET_BY_IMPORTS = (NVML,)  # by Lightning's and DeepSpeed's
LAST_LINES = 5


class ProcessError(SoloError, RuntimeError):
    """A child process ended without its message, or raised an exception that can't be pickled."""


@contextmanager
def environment(variables: Mapping[str, str], *, everything: bool = False) -> Iterator[None]:
    """Set environment variables in a context; at its end restore them and those that imports set, or ``everything``."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in {*os.environ, *before} if everything else {*variables, *SET_BY_IMPORTS}:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


class Child:
    """A child process.

    Args:
        pid: the child's process id.
        connection: the connection to the child.
        output: the file that it prints to; None if it prints to a file that this object doesn't own.

    Attributes:
        oom_kills: processes that the kernel killed for lack of memory while the child ran; set by `wait`.
        peak_bytes: its peak resident memory, or that of its largest child; set by `wait`.
    """

    def __init__(self, pid: int, connection: Connection, output: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.connection = connection
        self.output = output
        self._printed = 0  # bytes of output before the last message to it
        self.oom_kills = self.peak_bytes = 0
        self._oom_kills_before = oom_kills()
        self._exit_code: int | None = None

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ProcessError: the child has ended.
        """
        self._printed = self._output_bytes()
        try:
            self.connection.send(message)
        except OSError:
            raise ProcessError(self.death()) from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the child's next message, or raise it if it is an exception.

        Raises:
            ProcessError: the child ended without another message; says how it ended.
            TimeoutError: it sent none in time.
        """
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise ProcessError(self.death()) from None
        if isinstance(message, BaseException):
            raise message
        return message

    def signal(self, number: int) -> None:
        """Send a signal to the child's process group if it leads one, else to the child; do nothing if it has ended."""
        if self._exit_code is None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if os.getpgid(self.pid) == self.pid else os.kill)(self.pid, number)

    def wait(self) -> int:
        """Wait for the child's end and return its exit code, which is negative for a signal."""
        if self._exit_code is None:
            try:
                _, status, usage = os.wait4(self.pid, 0)
                self._exit_code, self.peak_bytes = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
            except ChildProcessError:  # other code in this process has waited for it
                self._exit_code = 0
            self.oom_kills = oom_kills() - self._oom_kills_before
        return self._exit_code

    def close(self) -> int:
        """Kill the child and its process group, if it leads one; return the exit code."""
        self.signal(signal.SIGKILL)
        self.connection.close()
        if self.output is not None:
            self.output.close()
        return self.wait()

    def death(self) -> str:
        """Return a text that says how the child ended, with the last lines that it printed."""
        exit_code = self.wait()
        how = ending(exit_code)
        if exit_code == -signal.SIGKILL:
            how += " by the kernel, for lack of memory" if self.oom_kills else ", as the kernel does for lack of memory"
        return how + self.last_output()

    def last_output(self) -> str:
        """Return the last lines that the child printed since the last message to it, as the end of a sentence."""
        if self.output is None:
            return ""
        # without moving the file's position, which the child shares
        text = os.pread(self.output.fileno(), self._output_bytes() - self._printed, self._printed)
        return "\n".join(["; it last printed:", *text.decode(errors="replace").splitlines()[-LAST_LINES:]])

    def _output_bytes(self) -> int:
        return 0 if self.output is None else os.fstat(self.output.fileno()).st_size


def fork(work: Callable[[Connection], int]) -> Child:
    """Call a function with a connection to this process in a fork, which exits with its result; 1 for an exception."""
    ours, theirs = Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, ours)
    status = 1
    try:
        end_with_parent(parent)
        ours.close()
        status = work(theirs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def start(
    function: str,
    *arguments: Any,
    output: IO[bytes] | None = None,
    inherited: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
    killed_with_parent: bool = True,
) -> Child:
    """Start a fresh interpreter that calls a ``"module:function"`` with a connection to this process, and arguments.

    It has the same `sys.path`, an empty standard input and a session of its own.

    Args:
        function: path of the function; the new interpreter imports its module.
        arguments: arguments of the function, which are pickled.
        output: the file that it prints to; by default a temporary one, for `Child.last_output`.
        inherited: numbers of open files that it inherits.
        variables: environment variables that it has besides those of this process, or with other values.
        killed_with_parent: False for a child that ends by itself when the connection does.
    """
    ours, theirs = Pipe()
    own = tempfile.TemporaryFile(buffering=0) if output is None else None  # noqa: SIM115 - `Child.close` closes it
    files = (theirs.fileno(), *inherited)
    # the folders first: this package may be found by one of them
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import call; "
    code += f"call({function!r}, {files}, {os.getpid() if killed_with_parent else None})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output or own,
            stderr=output or own,
            pass_fds=files,
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )
    process.returncode = 0  # `Child.wait` waits for it
    with suppress(ConnectionError):  # if it has ended already, `Child.receive` says so
        ours.send(arguments)
    return Child(process.pid, ours, own)


def call(function: str, files: Sequence[int], parent: int | None) -> None:
    """Call the function of `start`, in the interpreter that it started."""
    if parent is not None:
        end_with_parent(parent)
    for file in files:
        os.set_inheritable(file, False)
    connection = Connection(files[0])
    arguments = connection.recv()
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(connection, *arguments)


def reply(connection: Connection, function: Callable[[], object]) -> int:
    """Send a function's result or exception, or a `ProcessError` if that can't be pickled; return 0."""
    try:
        message = function()
    except Exception as error:
        message = error
    try:
        if isinstance(message, Exception):
            pickle.loads(pickle.dumps(message))  # some can be pickled, but not loaded
        connection.send(message)
    except Exception as error:
        why = message if isinstance(message, Exception) else error
        connection.send(ProcessError(f"{type(why).__name__}: {why}"))
    return 0


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (on Linux only); exit if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def ending(exit_code: int) -> str:
    """Return an exit code as text.

    >>> ending(3), ending(-11), ending(-77)
    ('exit status 3', 'SIGSEGV', 'signal 77')
    """
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def oom_kills(root: Path = Path("/")) -> int:
    """Return the number of processes the kernel has killed for lack of memory since boot; 0 if not counted."""
    try:
        lines = (root / "proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def is_running(pid: int | str) -> bool:
    """Return whether a process runs; one that has ended, and that its parent hasn't waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
