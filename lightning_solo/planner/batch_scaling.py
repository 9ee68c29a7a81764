"""The trace of any micro-batch from traces of two: allocations and costs are linear in the number of examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.capture import Trace


@dataclass
class Affine:
    """A trace of micro-batch ``low`` and one of ``high`` that made the same allocations in the same order."""

    low: int
    high: int
    at_low: Trace
    at_high: Trace

    def at(self, size: int) -> Trace:
        """Return the trace of another micro-batch, of at least 1."""

        def line(first: int, second: int) -> int:
            slope, rest = divmod((second - first) * (size - self.low), self.high - self.low)
            return first + slope + (1 if 2 * rest > self.high - self.low else 0)

        low, high = self.at_low, self.at_high
        events = [
            (storage, line(first, second))
            for (storage, first), (_, second) in zip(low.log.events, high.log.events, strict=True)
        ]
        held = {storage: line(first, high.log.held[storage]) for storage, first in low.log.held.items()}
        costs = [
            a._replace(flops=line(a.flops, b.flops), bytes=line(a.bytes, b.bytes))
            for a, b in zip(low.costs, high.costs, strict=True)
        ]
        host = line(low.host_bytes, high.host_bytes)
        log = EventLog(events, low.log.labels, held)
        return Trace(log, low.phases, costs, low.steps, low.assumptions, host, low.sizes)

    def gives(self, size: int, trace: Trace) -> bool:
        """Tell whether the trace of a third micro-batch holds, event by event, what lies on the line of the two."""
        return self.at(size).log == canonical(trace.log, trace.phases)


def affine(low: int, at_low: Trace, high: int, at_high: Trace) -> Affine | None:
    """Return what gives every micro-batch, or ``None`` where the two sizes did not do the same in the same order."""
    low_log, high_log = canonical(at_low.log, at_low.phases), canonical(at_high.log, at_high.phases)
    if _shape(low_log) != _shape(high_log) or len(at_low.costs) != len(at_high.costs):
        return None
    if at_low.phases != at_high.phases or at_low.steps != at_high.steps:
        return None
    return Affine(low, high, _with(at_low, low_log), _with(at_high, high_log))


def _with(trace: Trace, log: EventLog) -> Trace:
    return replace(trace, log=log)


def _shape(log: EventLog) -> tuple[list[tuple[int, bool]], list[str], list[int]]:
    return [(storage, change > 0) for storage, change in log.events], log.labels, list(log.held)


def canonical(log: EventLog, phases: list[tuple[int, int, str]]) -> EventLog:
    """Return a log in which storages are numbered in order of birth, and deaths in a row are sorted.

    What one operator frees comes in any order. A row ends where a phase begins, so that those stay where they are.
    """
    numbers = {storage: index for index, storage in enumerate(log.held)}
    events: list[tuple[int, int]] = []
    deaths: list[tuple[int, int]] = []
    begins = {first for first, _, _ in phases}
    for index, (storage, change) in enumerate(log.events):
        if index in begins or change > 0:
            events += sorted(deaths)
            deaths.clear()
        number = numbers.setdefault(storage, len(numbers))
        (deaths if change < 0 else events).append((number, change))
    events += sorted(deaths)
    labels = [log.labels[storage] for storage in numbers]
    return EventLog(events, labels, {numbers[storage]: held for storage, held in log.held.items()})
