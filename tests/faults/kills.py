"""A process that saves again and again is killed, and its files are read."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FAILPOINTS = {"fsync", "replace", "rename", "unlink", "write", "flush", "flock", "open", "close", "mkdir", "ftruncate"}
"""C functions before and after which a process is killed."""


@dataclass
class Kills:
    """What came of killed saves.

    Attributes:
        trials: processes that were killed.
        unreadable: trials after which the newest file couldn't be read, or had other content than was saved.
        lost: trials after which a save was gone that had returned before the kill.
        saves: saves that returned, in all trials.
    """

    trials: int = 0
    unreadable: int = 0
    lost: int = 0
    saves: int = 0

    def add(self, saved: int | None, loaded: int | None) -> None:
        """Count a trial with the number of the last save that returned, and of the one that was read."""
        self.trials += 1
        self.unreadable += loaded is None and saved is not None
        self.lost += loaded is not None and saved is not None and loaded < saved


def at_random(rng: random.Random, longest_s: float) -> Callable[[int], None]:
    """Return a function that kills a process after a random time."""
    delay = rng.uniform(0, longest_s)

    def kill(process: int) -> None:
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)

    return kill


def at_call(number: int) -> None:
    """Kill this process by SIGKILL before, or after, the C function of a failpoint that is called as number ``number``.

    Even numbers of calls and returns are counted alike.
    """
    left = number

    def count(frame: Any, event: str, function: Any) -> None:
        nonlocal left
        if event in ("c_call", "c_return") and getattr(function, "__name__", "") in FAILPOINTS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def killed(save: Callable[[int], None], first: int, kill: Callable[[int], None] | int) -> tuple[int | None, int]:
    """Run ``save(first)``, ``save(first + 1)``, ... in a forked process that is killed.

    Args:
        save: saves a checkpoint of a number.
        first: the first number.
        kill: kills the process with the given number; or the number of the failpoint at which it kills itself.

    Returns:
        The number of the last save that returned, or None, and how many did.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            if isinstance(kill, int):
                at_call(kill)
            for number in range(first, first + 10_000):
                save(number)
                os.write(writing, b"%d\n" % number)
        finally:
            os._exit(1)  # of a child that wasn't killed: an error in `save`
    os.close(writing)
    if not isinstance(kill, int):
        select.select([reading], [], [], 30)  # the first save has returned: the process is at work
        kill(process)
    _, status = os.waitpid(process, 0)
    with os.fdopen(reading) as pipe:
        numbers = [int(line) for line in pipe.read().split()]
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"the process that saves ended by itself, after {len(numbers)} saves")
    return (numbers[-1] if numbers else None), len(numbers)
