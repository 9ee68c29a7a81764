"""Signals that are recorded when they arrive; the caller decides when to act."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a process to end."""


def status(number: int) -> int:
    """Return the exit status of a process that a signal ended, as shells report it.

    >>> status(signal.SIGTERM)
    143
    """
    return 128 + number


def end_at_once(number: int) -> None:
    """End this process without cleaning up, with the exit status of a signal."""
    os._exit(status(number))


@contextmanager
def caught_signals(
    numbers: Sequence[int] = STOPS, repeated: Callable[[int], None] | None = None
) -> Iterator[list[int]]:
    """Yield a list of the signals that arrive instead of raising; ignored signals stay ignored.

    Args:
        numbers: the signals.
        repeated: called with a signal that asks the process to end after another one did so.
    """
    signals: list[int] = []
    before = {}

    def record(number: int, _: object) -> None:
        if repeated is not None and number in STOPS and any(each in STOPS for each in signals):
            repeated(number)
        signals.append(number)

    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background job
                before[number] = signal.signal(number, record)
    except ValueError:  # not in the main thread, where no signal arrives
        pass
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
