"""Compute the trace of any micro-batch from two traces: bytes and costs are linear in the number of examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.notes import Mark


@dataclass
class AffineTrace:
    """Traces of micro-batches ``low`` and ``high`` that allocate the same storages in the same order."""

    low: int
    high: int
    at_low: Trace
    at_high: Trace

    def at(self, size: int) -> Trace:
        """Return the trace of a micro-batch of ``size`` examples, at least 1."""

        def line(first: int, second: int) -> int:
            if first == second:
                return first
            slope, rest = divmod((second - first) * (size - self.low), self.high - self.low)
            return first + slope + (1 if 2 * rest > self.high - self.low else 0)

        low, high = self.at_low, self.at_high
        events = [
            at_low if at_low == at_high else (at_low[0], line(at_low[1], at_high[1]))
            for at_low, at_high in zip(low.log.events, high.log.events, strict=True)
        ]
        held = {storage: line(size_low, high.log.held[storage]) for storage, size_low in low.log.held.items()}
        costs = [
            a if a == b else a._replace(flops=line(a.flops, b.flops), bytes=line(a.bytes, b.bytes))
            for a, b in zip(low.costs, high.costs, strict=True)
        ]
        log = EventLog(events, low.log.labels, held)
        return replace(low, log=log, costs=costs, host_bytes=line(low.host_bytes, high.host_bytes))

    def predicts(self, size: int, trace: Trace) -> bool:
        """Return whether the trace of a third micro-batch has exactly the predicted events."""
        return self.at(size).log == canonical(trace.log, trace.phases)

    def contains(self, size: int, trace: Trace) -> bool:
        """Return whether a trace of another micro-batch has no allocation and no operator but predicted ones."""
        whole = self.at(size)
        changes, predicted = (
            Counter((each.log.labels[storage], change) for storage, change in each.log.events)
            for each in (trace, whole)
        )
        return changes <= predicted and Counter(trace.costs) <= Counter(whole.costs)


def affine_trace(low: int, at_low: Trace, high: int, at_high: Trace) -> AffineTrace | None:
    """Return the trace of every micro-batch, or ``None`` if the two traces differ in their operations or order."""
    low_log, high_log = (canonical(trace.log, trace.phases, trace.marks) for trace in (at_low, at_high))
    if _shape(low_log) != _shape(high_log) or len(at_low.costs) != len(at_high.costs):
        return None
    if (at_low.phases, at_low.steps, at_low.marks) != (at_high.phases, at_high.steps, at_high.marks):
        return None
    return AffineTrace(low, high, replace(at_low, log=low_log), replace(at_high, log=high_log))


def _shape(log: EventLog) -> tuple[list[tuple[int, bool]], list[str], list[int]]:
    return [(storage, change > 0) for storage, change in log.events], log.labels, list(log.held)


def canonical(log: EventLog, phases: list[tuple[int, int, str]], marks: Sequence[Mark] = ()) -> EventLog:
    """Return a log with storages numbered in order of allocation, and consecutive frees sorted.

    The order in which one operator frees several storages is arbitrary. Frees are sorted separately in each phase,
    and between marks.
    """
    numbers = {storage: index for index, storage in enumerate(log.held)}
    events: list[tuple[int, int]] = []
    frees: list[tuple[int, int]] = []
    begins = {first for first, _, _ in phases} | {mark.event for mark in marks}
    for index, (storage, change) in enumerate(log.events):
        if index in begins or change > 0:
            events += sorted(frees)
            frees.clear()
        number = numbers.setdefault(storage, len(numbers))
        (frees if change < 0 else events).append((number, change))
    events += sorted(frees)
    labels = [log.labels[storage] for storage in numbers]
    return EventLog(events, labels, {numbers[storage]: held for storage, held in log.held.items()})
