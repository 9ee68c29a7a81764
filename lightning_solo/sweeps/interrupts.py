"""Records Ctrl-C and SIGTERM; the caller decides when to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Yield a list of the signals that arrive instead of raising; ignored signals stay ignored."""
    signals: list[int] = []
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in a shell's background job
                before[number] = signal.signal(number, lambda number, _: signals.append(number))
    except ValueError:  # not in the main thread, where no signal arrives
        pass
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
