"""The schedule of operations on a device's streams.

A GPU has a stream for kernels and a copy engine for each direction of the bus. Each runs its operations in the order in
which the host launches them; an operation that waits for one of another stream starts after it. Copies of both
directions at once may slow one another.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

COMPUTE, TO_DEVICE, TO_HOST = STREAMS = ("compute", "to device", "to host")
AWAITED = "awaited"
"""Stands for a stream: nothing runs, but the next operator waits for a copy."""
BESIDE = "beside"
"""Stands for a stream: until the next one, operators run on a second stream, after those so far."""


class Operation(NamedTuple):
    """One operation of a stream.

    Args:
        stream: one of ``STREAMS``.
        seconds: its duration.
        after: positions of the operations that must end before it starts.
        name: label in a picture.
        queue: operations of one queue run in order; those of several take turns, so that one that waits for another
            stream doesn't hold up the others.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    name: str = ""
    queue: int = 0


class Span(NamedTuple):
    """An interval in which a stream is busy, in seconds from the start of the schedule, and its used share."""

    stream: str
    start_s: float
    end_s: float
    name: str = ""
    share: float = 1.0


def schedule(
    operations: Iterable[Operation], launch_s: float = 0.0, both: tuple[float, float] = (1.0, 1.0)
) -> list[Span]:
    """Return the time at which each operation runs.

    Args:
        operations: in the order in which the host launches them.
        launch_s: seconds of a launch on the host, which runs ahead of the device and never waits.
        both: the shares of their speed that copies to the device and to the host reach while both run.

    >>> [span.start_s for span in schedule([Operation("to device", 2.0), Operation("compute", 3.0, after=(0,))])]
    [0.0, 2.0]
    >>> copies = [Operation("to device", 1.0), Operation("to host", 2.0)]
    >>> [span.end_s for span in schedule(copies, both=(0.5, 1.0))]
    [2.0, 2.0]
    """
    operations = list(operations)
    if both != (1.0, 1.0) or any(each.queue for each in operations):
        return _by_events(operations, launch_s, {TO_DEVICE: both[0], TO_HOST: both[1]})
    free: dict[str, float] = {}
    spans: list[Span] = []
    for number, (stream, seconds, after, name, _) in enumerate(operations):
        start = max(number * launch_s, free.get(stream, 0.0))
        for other in after:
            start = max(start, spans[other].end_s)
        free[stream] = start + seconds
        spans.append(Span(stream, start, start + seconds, name))
    return spans


def _by_events(operations: Sequence[Operation], launch_s: float, shares: Mapping[str, float]) -> list[Span]:
    """Return the schedule event by event, since later copies may run first, or slow those that run."""
    waiting: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    for number, each in enumerate(operations):
        waiting[each.stream, each.queue].append(number)
    running: dict[str, int] = {}
    starts, ends = [0.0] * len(operations), [math.inf] * len(operations)
    done, now = [False] * len(operations), 0.0
    for _ in range(2 * len(operations)):
        event, number = min(((ends[each], each) for each in running.values()), default=(math.inf, -1))
        for (stream, _), queue in waiting.items():
            if queue and stream not in running and all(done[other] for other in operations[queue[0]].after):
                event, number = min((event, number), (max(now, queue[0] * launch_s), queue[0]))
        now, one = event, operations[number]
        is_end = running.get(one.stream) == number
        opposite = {TO_DEVICE: TO_HOST, TO_HOST: TO_DEVICE}.get(one.stream, "")
        if opposite in running:
            other, share = running[opposite], shares[opposite]
            ends[other] = now + (ends[other] - now) * (share if is_end else 1 / share)
        if is_end:
            done[number] = True
            del running[one.stream]
            continue
        running[one.stream] = waiting[one.stream, one.queue].popleft()
        starts[number] = now
        ends[number] = now + one.seconds / (shares[one.stream] if opposite in running else 1.0)
    return [Span(each.stream, start, end, each.name) for each, start, end in zip(operations, starts, ends, strict=True)]


def length(spans: Iterable[Span]) -> float:
    """Return the seconds until the last stream ends."""
    return max((span.end_s for span in spans), default=0.0)


def busy(spans: Iterable[Span], stream: str) -> float:
    """Return the seconds in which a stream is busy."""
    return sum((span.end_s - span.start_s) * span.share for span in spans if span.stream == stream)


def condensed(spans: Sequence[Span], parts: int = 200) -> list[Span]:
    """Return a schedule for a picture: at most ``parts`` spans of equal length, each with its used share."""
    part = length(spans) / parts
    work: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        first, last = (min(int(at / part), parts - 1) for at in (span.start_s, span.end_s)) if part else (0, -1)
        for index in range(first, last + 1):
            inside = min(span.end_s, (index + 1) * part) - max(span.start_s, index * part)
            work[span.stream, index][span.name] += inside * span.share
    condensed_spans: list[Span] = []
    for (stream, index), names in sorted(work.items()):
        name, share = max(names, key=lambda name: names[name]), min(round(sum(names.values()) / part, 2), 1.0)
        before = condensed_spans[-1] if condensed_spans else None
        if before is not None and before[3:] == (name, share) and before[0] == stream and before.end_s == index * part:
            condensed_spans[-1] = before._replace(end_s=(index + 1) * part)
        elif share:
            condensed_spans.append(Span(stream, index * part, (index + 1) * part, name, share))
    return condensed_spans
