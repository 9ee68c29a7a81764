"""Processes that save again and again are killed, at a chosen call or a random moment."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from itertools import count
from typing import Any

FAILPOINTS = {"fsync", "replace", "rename", "unlink", "write", "flush", "flock", "open", "close", "mkdir", "ftruncate"}
"""C functions before and after which a process is killed."""

LONGEST_S = 30
"""Seconds after which a process that hangs is ended."""

Kill = Callable[[int], None] | int
"""Kills the process with the given number; or the number of the failpoint at which the process kills itself."""


def at_random(rng: random.Random, longest_s: float) -> Kill:
    """Return a function that kills a process after a random time."""
    delay = rng.uniform(0, longest_s)

    def kill(process: int) -> None:
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)

    return kill


def at_call(number: int, names: Set[str]) -> None:
    """Kill this process by SIGKILL before, or after, the C function of ``names`` that is called as number ``number``.

    Even numbers of calls and returns are counted alike, and those of all threads together.
    """
    left = number

    def spend() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _profile(names, spend)


@contextmanager
def counted(names: Set[str]) -> Iterator[list[int]]:
    """Count calls and returns as `at_call` does; the list that is yielded has their number at the end."""
    found = count(1)
    number = [0]
    _profile(names, lambda: next(found))
    try:
        yield number
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented
        number[0] = next(found) - 1


def _profile(names: Set[str], act: Callable[[], object]) -> None:
    """Call ``act`` before and after each C function of ``names``, in this thread and in those that begin later."""

    def look(frame: Any, event: str, function: Any) -> None:
        if event in ("c_call", "c_return") and function.__name__ in names and not _is_of_text(function):
            act()

    threading.setprofile(look)
    sys.setprofile(look)


def _is_of_text(function: Any) -> bool:
    """Return whether a function is such as ``str.replace``."""
    return isinstance(getattr(function, "__self__", None), str)


class Child:
    """A forked process that saves until it is killed."""

    def __init__(self, pipe: int, kill: Kill, names: Set[str]) -> None:
        self.pipe, self.kill, self.names = pipe, kill, names

    def begin(self) -> None:
        """Be killed from now on."""
        os.write(self.pipe, b"\n")
        if isinstance(self.kill, int):
            at_call(self.kill, self.names)

    def report(self, number: int) -> None:
        """Tell the first process that a save returned."""
        os.write(self.pipe, b"%d\n" % number)


def trial(kill: Kill, names: Set[str] = FAILPOINTS) -> list[int] | Child:
    """Fork a process and kill it, after it has begun to save.

    Returns:
        In the first process the numbers that the forked one has reported, once it is dead. In the forked one `Child`.

    Raises:
        RuntimeError: the forked process ended by itself, or hung.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        signal.alarm(LONGEST_S)
        return Child(writing, kill, names)
    os.close(writing)
    if not isinstance(kill, int):
        select.select([reading], [], [], LONGEST_S)
        kill(process)
    _, status = os.waitpid(process, 0)
    with os.fdopen(reading) as pipe:
        numbers = [int(line) for line in pipe.read().split()]
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(f"the process that saves ended by itself or hung, after {len(numbers)} saves")
    return numbers


def killed(save: Callable[[int], None], first: int, kill: Kill) -> tuple[int | None, int]:
    """Run ``save(first)``, ``save(first + 1)``, ... in a forked process that is killed.

    Returns:
        The number of the last save that returned, or None, and how many did.
    """
    outcome = trial(kill)
    if isinstance(outcome, list):
        return (outcome[-1] if outcome else None), len(outcome)
    try:
        outcome.begin()
        for number in range(first, first + 10_000):
            save(number)
            outcome.report(number)
    finally:
        os._exit(1)  # an error in `save`
