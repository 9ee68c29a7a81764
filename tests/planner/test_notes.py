"""Notes of a trace become staging buffers and marks, as if the trace had had these from the start."""

from __future__ import annotations

import torch
from torch import nn

from lightning_solo.optim.staging import Staging
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.notes import MARK, SLOT, Mark, label, resolved
from lightning_solo.planner.timeline import AWAITED, TO_DEVICE, TO_HOST
from lightning_solo.planner.tracer import Cost, Tracer, buffer_of, ring_buffer
from lightning_solo.units import MiB

SIZES = [MiB, 3 * MiB, MiB, MiB, 2 * MiB]


def staged(served: int) -> Trace:
    tracer = Tracer(nn.Identity())
    tracer.start([])
    staging = Staging(torch.device("cpu"))
    staging.serve(served)
    for size in SIZES:
        tracer.stage(staging, size)
        for stream in (TO_DEVICE, AWAITED, TO_HOST):
            tracer.copy(stream, size, SLOT)
    return Trace(tracer.log, tracer.phases, tracer.costs, [len(tracer.costs)])


def test_pieces_take_turns_in_three_buffers() -> None:
    trace = resolved(staged(0))
    assert [cost.slot for cost in trace.costs] == [n for n in (0, 1, 2, 0, 1) for _ in range(3)]
    # three slots of 1, 3 and 1 MiB; the last two pieces find room in the first two
    assert [size for _, size in trace.log.events] == [MiB, 3 * MiB, MiB]
    assert {trace.log.labels[storage] for storage, _ in trace.log.events} == {"activations"}  # as grad mode is on


def test_buffers_take_a_sixteenth_of_the_bytes_that_pass_through_them() -> None:
    trace = resolved(staged(16 * 15 * MiB))  # at first 15 of 1 MiB, then 5 of 3 MiB
    assert [cost.slot for cost in trace.costs[::3]] == [0, 1, 2, 3, 4]
    assert trace.log.peak()[0] == sum(SIZES)


def test_buffers_that_are_too_small_are_freed_first() -> None:
    tracer = Tracer(nn.Identity())
    tracer.start([])
    staging = Staging(torch.device("cpu"))
    for size in (1, 1, 1, 2):
        tracer.stage(staging, size * MiB)
        tracer.copy(TO_DEVICE, size, SLOT)
    trace = resolved(Trace(tracer.log, tracer.phases, tracer.costs, [4]))
    assert [size // MiB for _, size in trace.log.events] == [1, 1, 1, -1, 2]


def test_marks_count_the_events_and_costs_before_them() -> None:
    tracer = Tracer(nn.Identity())
    tracer.start([])
    for block in (0, 1):
        tracer.note(MARK, "forward")
        tracer.costs.append(Cost(0, 0, torch.uint8, label(MARK, "forward", 0), block))
        number = tracer.log.born("activations")
        tracer.log.events.append((number, 8))
        tracer.launch(8)
    tracer.enter("backward")
    trace = resolved(Trace(tracer.log, tracer.phases, tracer.costs, [len(tracer.costs)], blocks=["a", "b"]))
    assert trace.marks == [Mark(0, 0, "forward", "a", 0), Mark(1, 1, "forward", "b", 0)]
    assert (len(trace.log.events), len(trace.costs), trace.steps) == (2, 2, [2])
    assert trace.phases == [(0, 0, "between"), (2, 2, "backward")]


def test_blocks_of_a_ring_share_buffers() -> None:
    buffers = [buffer_of(ring_buffer(3, block)) for block in range(6)]
    assert buffers == [*buffers[:3]] * 2
    assert len(set(buffers)) == 3
    assert [buffer_of(slot) for slot in (-2, -1, 0, 5)] == [-2, -1, 0, 5]
