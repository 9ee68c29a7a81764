"""The schedule of operations on a device's streams.

A GPU has a stream for kernels and a copy engine for each direction of the bus. Each runs its operations in the order in
which the host launches them; an operation that waits for one of another stream starts after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

COMPUTE, TO_DEVICE, TO_HOST = STREAMS = ("compute", "to device", "to host")
AWAITED = "awaited"
"""Stands for a stream: nothing runs, but the next operator waits for a copy."""


class Operation(NamedTuple):
    """One operation of a stream.

    Args:
        stream: one of ``STREAMS``.
        seconds: its duration.
        after: positions of the operations that must end before it starts.
        name: label in a picture.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    name: str = ""


class Span(NamedTuple):
    """An interval in which a stream is busy, in seconds from the start of the schedule, and its used share."""

    stream: str
    start_s: float
    end_s: float
    name: str = ""
    share: float = 1.0


def schedule(operations: Iterable[Operation], launch_s: float = 0.0) -> list[Span]:
    """Return the time at which each operation runs.

    Args:
        operations: in the order in which the host launches them.
        launch_s: seconds of a launch on the host, which runs ahead of the device and never waits.

    >>> [span.start_s for span in schedule([Operation("to device", 2.0), Operation("compute", 3.0, after=(0,))])]
    [0.0, 2.0]
    """
    free: dict[str, float] = {}
    spans: list[Span] = []
    for number, (stream, seconds, after, name) in enumerate(operations):
        start = max(number * launch_s, free.get(stream, 0.0))
        for other in after:
            start = max(start, spans[other].end_s)
        free[stream] = start + seconds
        spans.append(Span(stream, start, start + seconds, name))
    return spans


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
