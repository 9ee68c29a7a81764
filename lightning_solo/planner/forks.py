"""Functions run in parallel, all but the first in forked processes: tracing is Python, which uses one core."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

from lightning_solo.errors import PlanError
from lightning_solo.processes import end_with_parent

Result = TypeVar("Result")


def _always(result: Any) -> bool:
    return True


def run_in_forks(
    first: Callable[[], Result], *others: Callable[[], Result], needed: Callable[[Result], bool] = _always
) -> list[Result]:
    """Return the results of all functions, in order; no process is left.

    Args:
        first: runs in this process.
        others: run in forked processes.
        needed: whether the others still are, by the first one's result; if not, it is the only one.

    Raises:
        Exception: that of one of the functions, in their order.
        PlanError: a forked process died, or raised an exception that can't be pickled.
    """
    with ExitStack() as forks:
        running = [forks.enter_context(_fork(function)) for function in others]
        result = first()
        return [result, *(wait() for wait in running)] if needed(result) else [result]


@contextmanager
def _fork(function: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run a function in a fork, and yield a function that waits for its result; the fork ends with the context."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _reply_and_exit(function, writer)
    os.close(writer)
    status: int | None = None

    def wait() -> Any:
        nonlocal status
        reply = pipe.read()
        _, status = os.waitpid(pid, 0)
        if not reply:
            raise PlanError(f"a process that traces ended with status {os.waitstatus_to_exitcode(status)}")
        succeeded, result = pickle.loads(reply)
        if not succeeded:
            raise result
        return result

    with os.fdopen(reader, "rb") as pipe:
        try:
            yield wait
        finally:
            if status is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _reply_and_exit(function: Callable[[], object], writer: int) -> NoReturn:
    import torch  # not at the top: the process that imports this first has no torch yet

    try:
        end_with_parent()
        os.nice(3)  # where there are too few cores, the first function goes before: it may make the others needless
        gc.freeze()  # a process group among the parent's garbage waits, when freed, for threads that a fork lacks
        torch.set_num_threads(1)  # OpenMP's threads don't exist after a fork, and would be waited for
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(_reply(function))
    finally:
        os._exit(0)


def _reply(function: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((True, function()))
    except Exception as error:
        try:
            return pickle.dumps((False, error))
        except Exception:
            return pickle.dumps((False, PlanError(f"{type(error).__name__}: {error}")))
