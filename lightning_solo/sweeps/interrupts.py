"""Ctrl-C and SIGTERM, counted: what is in the middle of something looks when it can end well."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """How often somebody has asked this process to end, while it counts."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count instead of raising; a signal that this process ignores, as a shell's background job does, stays so."""

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
        """Raise KeyboardInterrupt if there was one."""
        if self.count:
            raise KeyboardInterrupt
