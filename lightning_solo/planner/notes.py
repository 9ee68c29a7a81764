"""Notes in a trace: parts of it that depend on all blocks, and are computed once the number of blocks is final.

The trace with all blocks follows from traces with few only if their parts repeat with the blocks. Staging buffers
don't: they take turns, and their number depends on the bytes that pass through them in all. So a trace has a note for
each piece that passes through a buffer, which repeats. Marks of blocks are notes too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_solo.memory.events import EventLog
from lightning_solo.optim.staging import SLOTS, Staging
from lightning_solo.planner.timeline import TO_DEVICE

if TYPE_CHECKING:
    from lightning_solo.planner.capture import Trace
    from lightning_solo.planner.tracer import Cost

STAGED, SERVED, MARK = "staged", "served", "mark"
SLOT = -(10**9)
"""Slot of the copies through a staging buffer, until it is known."""


class Mark(NamedTuple):
    """A place in a trace: the beginning or the end of a block's forward, or the beginning of its backward.

    Args:
        event, cost: numbers of events and costs before it.
        kind: `FORWARD`, `AFTER` or `BACKWARD` of `block_marks`.
        block: name of the block.
        call: number of its call in the micro-batch.
    """

    event: int
    cost: int
    kind: str
    block: str
    call: int


def label(*words: Any) -> str:
    """Return the label of a note's event."""
    return "|".join(map(str, words))


def is_note(label: str) -> bool:
    """Return whether a label is that of a note."""
    return "|" in label


def resolved(trace: Trace) -> Trace:
    """Return a trace with staging buffers and marks in place of notes.

    Raises:
        IndexError: notes are missing, as in a trace that was derived by mistake.
    """
    if not any(map(is_note, trace.log.labels)):
        return trace
    labels, events = list(trace.log.labels), list[tuple[int, int]]()
    stagings: dict[str, _CountedStaging] = {}
    slots: list[int] = []  # of the buffers that pieces pass through
    marked: list[int] = []  # numbers of events before marks
    moved: list[int] = []  # numbers of events before each of the trace's
    for storage, change in trace.log.events:
        moved.append(len(events))
        kind, *words = labels[storage].split("|")
        if not words:
            events.append((storage, change))
        elif change > 0 and kind == MARK:
            marked.append(len(events))
        elif change > 0:
            staging = stagings.setdefault(words[0], _CountedStaging(events, labels))
            if kind == SERVED:
                staging.serve(change - staging.served)
                continue
            staging.label = words[1]
            slots.append(staging.next_slot(change)[0])
    moved.append(len(events))
    costs: list[Cost] = []
    marks: list[Mark] = []
    turn = -1
    moved_costs: list[int] = []
    for cost in trace.costs:
        moved_costs.append(len(costs))
        kind, *words = cost.stream.split("|")
        if words:
            marks.append(Mark(marked[len(marks)], len(costs), words[0], trace.blocks[cost.slot], int(words[1])))
            continue
        if cost.slot == SLOT:
            turn += cost.stream == TO_DEVICE
            cost = cost._replace(slot=slots[turn])
        costs.append(cost)
    moved_costs.append(len(costs))
    return replace(
        trace,
        log=EventLog(events, labels, trace.log.held, trace.log.aside),
        phases=[(moved[event], moved_costs[cost], name) for event, cost, name in trace.phases],
        costs=costs,
        steps=[moved_costs[step] for step in trace.steps],
        marks=marks,
    )


class _CountedBuffer(NamedTuple):
    number: int
    bytes: int

    def numel(self) -> int:
        return self.bytes


class _CountedStaging(Staging):
    """A GPU's staging buffers, as events of a log."""

    def __init__(self, events: list[tuple[int, int]], labels: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.least = SLOTS["cuda"]
        self.label = ""
        self._events, self._labels = events, labels

    def _allocate(self, size: int) -> Any:
        buffer = _CountedBuffer(len(self._labels), size)
        self._labels.append(self.label)
        self._events.append(buffer)
        return buffer

    def _free(self, slot: Any) -> None:
        if slot.buffer is not None:
            self._events.append((slot.buffer.number, -slot.buffer.bytes))
        slot.buffer = None
