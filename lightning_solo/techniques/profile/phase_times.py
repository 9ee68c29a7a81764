"""Seconds of forward, backward and optimizer step, by the host's clock or by events on a CUDA device's stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_solo.memory.events import PHASES


class PhaseTimes:
    """Times phases. A phase within another one isn't counted in it.

    On a CUDA device each end of a phase is an event on the current stream, which is read once the device has passed
    it, so nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: list[str] = []
        self._since: Any = None
        self._parts: list[tuple[str, Any, Any]] = []  # phase, begin and end, of this optimizer step
        self._finished: deque[tuple[int, list[tuple[str, Any, Any]]]] = deque()  # optimizer steps of a batch, parts

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        """Begin a phase."""
        self._cut()
        self._open.append(name)

    def end(self, name: str) -> None:
        """End a phase, and continue the one around it; if another one is innermost, nothing happens."""
        if self._open[-1:] == [name]:
            self._cut()
            self._open.pop()

    def end_batch(self, *, steps: int, keep: bool = True) -> None:
        """End all phases; after optimizer ``steps`` the times since the last count, without ``keep`` they don't."""
        self._cut()
        self._open.clear()
        if steps:
            if keep and self._parts:
                self._finished.append((steps, self._parts))
            self._parts = []

    def take(self) -> dict[str, float]:
        """Return the mean seconds of each phase over the optimizer steps since the last call.

        Steps that the device hasn't finished are left for the next call.
        """
        count, seconds = 0, dict.fromkeys(PHASES, 0.0)
        while self._finished and (not self._cuda or self._finished[0][1][-1][2].query()):
            steps, parts = self._finished.popleft()
            count += steps
            for phase, begin, end in parts:
                seconds[phase] += begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
        return {phase: total / count for phase, total in seconds.items() if count}

    def _cut(self) -> None:
        now: Any = time.perf_counter()
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        if self._open:
            self._parts.append((self._open[-1], self._since, now))
        self._since = now
