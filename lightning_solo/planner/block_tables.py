"""Tables for the solver: bytes and seconds of each call of a block, from one trace for each mode of all blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_solo.errors import PlanError
from lightning_solo.planner.block_marks import AFTER, BACKWARD, FORWARD
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.device import CPU, Device
from lightning_solo.planner.notes import Mark
from lightning_solo.planner.solver import Call, Option, Problem
from lightning_solo.planner.step_time import KERNEL_S, LAUNCH_S, operations
from lightning_solo.planner.timeline import COMPUTE, TO_HOST
from lightning_solo.planner.tracer import Cost


@dataclass
class BlockTable:
    """What each call of a block takes in one trace, in its last micro-batch.

    Attributes:
        calls: (block, number of its call), in the order of forward.
        order: numbers of calls, in the order of backward.
        options: of each call.
        base: device bytes before the first call.
        between: most bytes from the end of the last call to backward, above the base and what calls keep.
        step: most device bytes of the optimizer step; 0 if there is none after backward.
        other_s: phase -> seconds of its operators outside blocks.
    """

    calls: list[tuple[str, int]]
    order: list[int]
    options: list[Option]
    base: int
    between: int
    step: int
    other_s: dict[str, float]


def block_table(trace: Trace, device: Device, micro_batches: int = 1) -> BlockTable:
    """Return the table of a marked trace; seconds are those of all micro-batches of a step.

    Raises:
        PlanError: no block was called in it, or none took part in backward.
    """
    marks = _last_micro_batch(trace.marks)
    live = list(accumulate((change for _, change in trace.log.events), initial=sum(trace.log.held.values())))
    first, last = marks[0], next(mark for mark in reversed(marks) if mark.kind == AFTER)
    begins = [mark for mark in marks if mark.kind == FORWARD]
    calls = [(mark.block, mark.call) for mark in begins]
    backwards = [mark for mark in marks if mark.kind == BACKWARD]
    order = [calls.index((mark.block, mark.call)) for mark in backwards]
    end = _end_of_backward(trace, backwards[-1])

    def most(one: tuple[int, int], other: tuple[int, int]) -> int:
        return max(live[one[0] : other[0] + 1])

    base = live[first.event]
    places = [(mark.event, mark.cost) for mark in (*begins, last)]
    kept = [live[after[0]] - live[before[0]] for before, after in pairwise(places)]
    forward = [most(before, after) - live[before[0]] for before, after in pairwise(places)]
    forward_costs = [trace.costs[before[1] : after[1]] for before, after in pairwise(places)]
    backward, backward_s = [0] * len(calls), [0.0] * len(calls)
    ends = [*((mark.event, mark.cost) for mark in backwards[1:]), end]
    for position, (number, mark, after) in enumerate(zip(order, backwards, ends, strict=True)):
        alive = sum(kept[other] for other in order[position:])
        backward[number] = most((mark.event, 0), after) - base - alive
        backward_s[number] = seconds(trace.costs[mark.cost : after[1]], device)
    options = [
        Option(
            kept[number],
            forward[number],
            backward[number],
            micro_batches * seconds(forward_costs[number], device),
            micro_batches * backward_s[number],
            sum(cost.bytes for cost in forward_costs[number] if cost.stream == TO_HOST),
        )
        for number in range(len(calls))
    ]
    between = most((last.event, 0), (backwards[0].event, 0)) - base - sum(kept)
    begin = trace.phases[_phase_at(trace, first.event)][1]
    outside = seconds(trace.costs[begin : first.cost], device) + seconds(
        trace.costs[last.cost : backwards[0].cost], device
    )
    other_s = {"forward": micro_batches * outside, "step": seconds(trace.costs[end[1] : trace.steps[-1]], device)}
    return BlockTable(calls, order, options, base, between, max(live[end[0] :], default=0), other_s)


def problem_of(tables: Mapping[str, BlockTable], budget: int, host: int | None) -> Problem:
    """Return the problem of a choice among modes, which have equal calls.

    Args:
        tables: mode -> table of a trace in which all blocks have this mode; the plainest first.
        budget: device bytes.
        host: bytes of the host; None if they aren't limited.

    Raises:
        PlanError: the modes call other blocks, or in another order.
    """
    first, *others = tables.values()
    if any((other.calls, other.order) != (first.calls, first.order) for other in others):
        raise PlanError("blocks are called in another order if they are recomputed")
    calls = [
        Call(block, {mode: table.options[number] for mode, table in tables.items()})
        for number, (block, _) in enumerate(first.calls)
    ]
    return Problem(
        calls,
        first.order,
        base=min(table.base for table in tables.values()),
        between=max(table.between for table in tables.values()),
        step=first.step,
        other_s=first.other_s,
        budget=budget,
        host=host,
    )


def seconds(costs: Sequence[Cost], device: Device) -> float:
    """Return the seconds of operators one after the other, without copies."""
    spans = [each.seconds for each in operations(costs, device) if each.stream == COMPUTE]
    launch_s = 0.0 if device.name == CPU else LAUNCH_S
    return max(sum(spans), len(spans) * max(launch_s, KERNEL_S))


def _last_micro_batch(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks of the last micro-batch: from the first forward after the last backward but one."""
    begins = [
        number
        for number, mark in enumerate(marks)
        if mark.kind == FORWARD and (number == 0 or marks[number - 1].kind == BACKWARD)
    ]
    last = list(marks[begins[-1] :]) if begins else []
    if not any(mark.kind == BACKWARD for mark in last):
        raise PlanError("no repeated block is called in training_step and takes part in backward")
    return last


def _phase_at(trace: Trace, event: int) -> int:
    return bisect_right([first for first, _, _ in trace.phases], event) - 1


def _end_of_backward(trace: Trace, mark: Mark) -> tuple[int, int]:
    """Return the numbers of events and costs at which the phase of a mark ends."""
    after = _phase_at(trace, mark.event) + 1
    return trace.phases[after][:2] if after < len(trace.phases) else (len(trace.log.events), len(trace.costs))
