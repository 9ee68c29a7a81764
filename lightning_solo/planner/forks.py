"""Run functions in parallel in forked processes, because tracing in Python uses one core."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from lightning_solo.errors import PlanError
from lightning_solo.processes import Child, ProcessError, fork, reply

Item = TypeVar("Item")
Result = TypeVar("Result")


def has_threads() -> bool:
    """Return whether this process has other threads, which a fork lacks, and for which a function may wait there.

    The one with which tqdm watches its bars doesn't count: nothing waits for it.
    """
    names = [type(thread).__name__ for thread in threading.enumerate() if thread is not threading.current_thread()]
    return any(name != "TMonitor" for name in names)


def run_in_forks(first: Callable[[], Result], *others: Callable[[], Result]) -> list[Result]:
    """Return the results of all functions, in order; no process is left.

    Args:
        first: runs in this process.
        others: run in forked processes; in this one if it has other threads.

    Raises:
        Exception: the first exception of a function, in the order of the functions.
        PlanError: a forked process died, or raised an exception that can't be pickled.
    """
    if has_threads():
        return [function() for function in (first, *others)]
    with ExitStack() as ends:
        forks = []
        for function in others:
            forks.append(fork(partial(_run, function)))
            ends.callback(forks[-1].close)
        result = first()
        try:
            return [result, *(each.receive() for each in forks)]
        except ProcessError as error:
            raise PlanError(f"a process that traces: {error}") from None


def run_in_workers(
    function: Callable[[Item], Result], items: Sequence[Item], key: Callable[[Item], object], count: int
) -> Iterator[tuple[Item, Result | ProcessError]]:
    """Call a function for each item in forked processes; yield (item, result) in the order of the items.

    Args:
        function: returns what can be pickled. The result of an item whose process died is a `ProcessError`.
        items: all different.
        key: items with an equal one are given to the same process, which may keep what they share.
        count: number of processes; with one, and if this process has other threads, all items run in this process.
    """
    if count == 1 or has_threads():
        yield from ((item, function(item)) for item in items)
        return
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    waiting = [*groups.values()]
    results: dict[Item, Result | ProcessError] = {}
    busy: dict[Any, tuple[Child, list[Item]]] = {}  # connection -> process, what it does and will do

    with ExitStack() as ends:

        def give(child: Child | None, group: list[Item]) -> None:
            """Give a process, or a new one, the next item of its group, or of the next group."""
            if not group and not waiting:
                return
            if child is None:
                child = fork(partial(_serve, function))
                ends.callback(child.close)
            group = group or waiting.pop(0)
            busy[child.connection] = child, group
            with suppress(ProcessError):  # `receive` says so
                child.send(group[0])

        for _ in range(min(count, len(groups))):
            give(None, [])
        for item in items:
            while item not in results:
                for connection in wait([*busy]):
                    child: Child | None
                    child, (first, *rest) = busy.pop(connection)
                    try:
                        (results[first],) = child.receive()
                    except ProcessError as error:
                        results[first], child = error, None
                    give(child, rest)
            yield item, results.pop(item)


def _serve(function: Callable[[Any], Any], connection: Connection) -> int:
    _prepare()
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return 0
        connection.send((function(item),))


def _run(function: Callable[[], Any], connection: Connection) -> int:
    _prepare()
    return reply(connection, function)


def _prepare() -> None:
    import torch  # not at the top: the process that imports this first has no torch yet

    gc.freeze()  # a process group among the parent's garbage waits, when freed, for threads that a fork lacks
    torch.set_num_threads(1)  # OpenMP's threads don't exist after a fork, and would be waited for
