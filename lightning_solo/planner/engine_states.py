"""A trace in which an engine's buffers stand for the model states, and without the step, which the engine takes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.capture import Trace

STATES = ("weights", "gradients", "optimizer_states")


def with_buffers(trace: Trace, buffers: Sequence[tuple[str, int]], host_bytes: int) -> Trace:
    """Return the trace with an engine's buffers in place of the model states.

    Args:
        trace: of a run without the engine.
        buffers: (category, bytes) of each on the device.
        host_bytes: that the engine stores on the host.
    """
    labels = list(trace.log.labels)
    firsts = [first for first, _, _ in trace.phases]
    dropped = {number for number, label in enumerate(labels) if label in STATES}
    events = []
    for index, (storage, change) in enumerate(trace.log.events):
        if change > 0 and trace.phases[bisect_right(firsts, index) - 1][2] == "optimizer_step":
            dropped.add(storage)
        if storage not in dropped:
            events.append((index, (storage, change)))
    held = {storage: size for storage, size in trace.log.held.items() if storage not in dropped}
    for category, size in buffers:
        held[len(labels)] = size
        labels.append(category)
    kept = [index for index, _ in events]
    phases = [(bisect_left(kept, first), costs, name) for first, costs, name in trace.phases]
    log = EventLog([event for _, event in events], labels, held)
    return replace(trace, log=log, phases=phases, host_bytes=host_bytes)
