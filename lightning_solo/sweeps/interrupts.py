"""Counts Ctrl-C and SIGTERM, so that work ends at a point of its choice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """The number of signals to end that this process got while it counted."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count instead of raising; a signal that is ignored, as in a shell's background job, stays ignored."""

        def count(*_: Any) -> None:
            self.count += 1

        before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, count)
        except ValueError:  # not in the main thread, where no signal arrives
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self.count:
            raise KeyboardInterrupt
