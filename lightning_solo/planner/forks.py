"""Run functions in parallel, all but the first in forked processes, because tracing in Python uses one core."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from lightning_solo.errors import PlanError
from lightning_solo.processes import ProcessError, fork, reply

Result = TypeVar("Result")


def run_in_forks(
    first: Callable[[], Result],
    *others: Callable[[], Result],
    needed: Callable[[Result], bool] = lambda _: True,
) -> list[Result]:
    """Return the results of all functions, in order; no process is left.

    Args:
        first: runs in this process.
        others: run in forked processes.
        needed: returns whether the others are needed, from the first one's result; if not, only that is returned.

    Raises:
        Exception: the first exception of a function, in the order of the functions.
        PlanError: a forked process died, or raised an exception that can't be pickled.
    """
    with ExitStack() as ends:
        forks = []
        for function in others:
            forks.append(fork(partial(_run, function)))
            ends.callback(forks[-1].close)
        result = first()
        try:
            return [result, *(each.receive() for each in forks)] if needed(result) else [result]
        except ProcessError as error:
            raise PlanError(f"a process that traces: {error}") from None


def _run(function: Callable[[], Any], connection: Connection) -> int:
    import torch  # not at the top: the process that imports this first has no torch yet

    os.nice(3)  # where there are too few cores, the first function runs first: it may make the others needless
    gc.freeze()  # a process group among the parent's garbage waits, when freed, for threads that a fork lacks
    torch.set_num_threads(1)  # OpenMP's threads don't exist after a fork, and would be waited for
    return reply(connection, function)
