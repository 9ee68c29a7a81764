"""The schedule of operations on streams, and the one that a preset with states on the host is planned by."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lightning_solo as solo
from lightning_solo.optim.adamw_states import state_layout
from lightning_solo.planner.device import device
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.step_time import KERNEL_S, LAUNCH_S, operations, step_schedule, step_seconds
from lightning_solo.planner.timeline import (
    AWAITED,
    BESIDE,
    COMPUTE,
    STREAMS,
    TO_DEVICE,
    TO_HOST,
    Operation,
    busy,
    condensed,
    length,
    schedule,
)
from lightning_solo.planner.tracer import Cost
from lightning_solo.report.plan_chart import timelines
from tests.conftest import long
from tests.modules import regression

H200 = replace(device("h200"), host_bandwidth=50e9, memory_bandwidth=4e12, bandwidth_reached=1.0)


def kernel(seconds: float) -> Cost:
    return Cost(0, round(seconds * 4e12), torch.float32)


def copies(up: float, down: float, slot: int) -> tuple[Cost, Cost]:
    """Return the copies of a piece to the device and back, which take so many seconds."""
    return (
        Cost(0, round(up * 50e9), torch.uint8, TO_DEVICE, slot),
        Cost(0, round(down * 50e9), torch.uint8, TO_HOST, slot),
    )


def streamed(pieces: int, slots: int, copy: float, compute: float) -> list[Cost]:
    costs = []
    for number in range(pieces):
        up, down = copies(copy, copy, number % slots)
        costs += [up, Cost(0, 0, torch.uint8, AWAITED, number % slots), kernel(compute), down]
    return costs


def test_streams_overlap_and_wait_for_one_another() -> None:
    spans = schedule(
        [
            Operation(TO_DEVICE, 2.0),
            Operation(COMPUTE, 3.0, after=(0,)),
            Operation(TO_DEVICE, 2.0),  # while the first is computed with
            Operation(COMPUTE, 1.0, after=(2,)),
            Operation(TO_HOST, 4.0, after=(3,)),
        ]
    )
    assert [(span.start_s, span.end_s) for span in spans] == [(0, 2), (2, 5), (2, 4), (5, 6), (6, 10)]
    assert length(spans) == 10
    assert busy(spans, TO_DEVICE) == 4


def test_the_host_launches_one_after_the_other() -> None:
    spans = schedule([Operation(COMPUTE, 0.1)] * 3, launch_s=1.0)
    assert [span.start_s for span in spans] == [0.0, 1.0, 2.0]


@given(st.lists(st.tuples(st.sampled_from(STREAMS), st.floats(0, 1), st.integers(0, 5)), max_size=20))
def test_any_schedule_keeps_its_rules(given: list[tuple[str, float, int]]) -> None:
    made = [Operation(stream, s, (n - back,) if 0 < back <= n else ()) for n, (stream, s, back) in enumerate(given)]
    spans = schedule(made)
    for number, operation in enumerate(made):
        before = [span.end_s for span in spans[:number] if span.stream == operation.stream]
        expected = max([*before[-1:], *(spans[other].end_s for other in operation.after), 0.0])
        assert spans[number].start_s == expected
    total = length(spans)
    assert total <= sum(seconds for _, seconds, _ in given) * (1 + 1e-9)
    for stream in STREAMS:
        assert busy(spans, stream) <= total * (1 + 1e-9)
        if total > 1e-3:
            assert busy(condensed(spans), stream) == pytest.approx(busy(spans, stream), abs=0.02 * total)


@given(st.lists(st.tuples(st.sampled_from(STREAMS), st.floats(0, 1), st.integers(0, 5)), max_size=20), st.floats(0, 1))
def test_directions_that_do_not_slow_one_another(given: list[tuple[str, float, int]], launch_s: float) -> None:
    made = [Operation(stream, s, (n - back,) if 0 < back <= n else ()) for n, (stream, s, back) in enumerate(given)]
    both = (1.0 - 1e-12, 1.0)  # computed event by event
    plain, by_events = schedule(made, launch_s), schedule(made, launch_s, both)
    assert [span.stream for span in plain] == [span.stream for span in by_events]
    for one, other in zip(plain, by_events, strict=True):
        assert (other.start_s, other.end_s) == pytest.approx((one.start_s, one.end_s), abs=1e-9)


@pytest.mark.parametrize(
    ("both", "up", "down"),
    [
        ((0.5, 1.0), (0, 5), (0, 4)),  # 2 of 3 s while the other runs, then the last
        ((0.5, 0.5), (0, 6), (0, 6 + 1)),
        ((1.0, 0.25), (0, 3), (0, 3 + 3.25)),
    ],
)
def test_copies_slow_one_another_while_both_run(
    both: tuple[float, float], up: tuple[float, float], down: tuple[float, float]
) -> None:
    spans = schedule([Operation(TO_DEVICE, 3.0), Operation(TO_HOST, 4.0)], both=both)
    assert [(span.start_s, span.end_s) for span in spans] == [pytest.approx(up), pytest.approx(down)]


def test_a_copy_that_waits_holds_up_its_own_queue_alone() -> None:
    made = [
        Operation(COMPUTE, 5.0),
        Operation(TO_DEVICE, 1.0, after=(0,)),
        Operation(TO_DEVICE, 1.0),
        Operation(TO_DEVICE, 2.0, queue=1),
        Operation(TO_DEVICE, 2.0, queue=1),
    ]
    assert [(span.start_s, span.end_s) for span in schedule(made)] == [(0, 5), (5, 6), (6, 7), (0, 2), (2, 4)]


def test_a_later_copy_slows_one_that_runs() -> None:
    made = [Operation(TO_DEVICE, 4.0), Operation(COMPUTE, 2.0), Operation(TO_HOST, 1.0, after=(1,))]
    spans = schedule([*made, Operation(COMPUTE, 1.0, after=(0,))], both=(0.5, 1.0))
    assert [(span.start_s, span.end_s) for span in spans] == [(0, 4.5), (0, 2), (2, 3), (4.5, 5.5)]


def test_a_device_with_slower_copies_both_ways_needs_more_time() -> None:
    copy = 0.01
    costs = streamed(20, 3, copy, 0.001)
    slow = replace(H200, host_bandwidth_both=[25e9, 50e9])
    assert step_seconds(costs, slow) > 1.4 * step_seconds(costs, H200)
    assert step_seconds(costs, replace(H200, host_memory_bandwidth=50e9)) == pytest.approx(2 * 20 * copy, rel=0.05)
    assert step_seconds(costs, replace(H200, host_memory_bandwidth=200e9)) == step_seconds(costs, H200)
    assert step_seconds(costs, replace(H200, host_memory_bandwidth=25e9)) == pytest.approx(4 * 20 * copy, rel=0.05)


def test_a_step_without_copies_is_the_sum_of_its_operators_or_what_launching_takes() -> None:
    assert step_seconds([kernel(1.0), kernel(2.0)], H200) == pytest.approx(3.0)
    many = [kernel(0.0)] * 1000  # each 4 us long and 10 us to launch
    assert KERNEL_S < LAUNCH_S
    assert step_seconds(many, H200) == pytest.approx(1000 * LAUNCH_S)


@pytest.mark.parametrize(
    ("copy", "compute", "slots", "expected"),
    [
        (1.0, 3.0, 3, 3.0),  # hidden behind what is computed
        (3.0, 1.0, 3, 3.0),  # as fast as the bus, one way at a time
        (1.0, 1.0, 1, 3.0),  # one buffer: up, compute, down, one after the other
        (1.0, 1.0, 2, 1.5),  # two: each is there every 3 seconds
        (1.0, 1.0, 3, 1.0),
    ],
)
def test_pieces_through_staging_buffers(copy: float, compute: float, slots: int, expected: float) -> None:
    assert step_seconds(streamed(60, slots, copy, compute), H200) / 60 == pytest.approx(expected, rel=0.01)


def test_operators_beside_others_wait_for_their_copies_alone_and_are_awaited() -> None:
    """An update beside a forward: its copy up takes 3 s, its kernel 1 s, and its copy down 2 s."""
    up, down = copies(3.0, 2.0, 0)
    update, turn = [up, Cost(0, 0, torch.uint8, AWAITED, 0), kernel(1.0), down], Cost(0, 0, torch.uint8, BESIDE, 7)
    other, awaited, used = kernel(5.0), Cost(0, 0, torch.uint8, AWAITED, 7), kernel(2.0)

    def ends(costs: list[Cost]) -> list[float]:
        """Return when each kernel ends: of before, the update, the others."""
        return [round(span.end_s, 3) for span in step_schedule([kernel(0.5), *costs], H200) if span.stream == COMPUTE]

    assert ends([*update, other, used]) == [0.5, 4.0, 9.0, 11.0]
    # one kernel runs at a time
    assert ends([turn, *update, turn, other, awaited, used]) == [0.5, 6.5, 5.5, 8.5]
    assert ends([turn, *update, turn, kernel(1.0), awaited, used]) == [0.5, 4.0, 1.5, 6.0]
    assert ends([turn, *update, turn, kernel(1.0), used]) == [0.5, 4.5, 1.5, 3.5]
    # a kernel beside those of before waits for them
    assert ends([other, turn, kernel(1.0), turn]) == [0.5, 5.5, 6.5]


def test_copies_back_overlap_with_the_next_step() -> None:
    # at the end of a step the last piece is on its way back, while the next forward runs
    step = [kernel(5.0), *streamed(1, 1, 1.0, 1.0)]
    assert length(step_schedule(step, H200)) == pytest.approx(7.0)  # its copy to the device hides behind the forward
    assert step_seconds(step, H200) == pytest.approx(6.0)


def test_copy_to_the_device_waits_for_an_empty_buffer() -> None:
    made = operations(streamed(3, 2, 1.0, 1.0), H200, ["backward"] * 12)
    assert [(operation.stream, operation.after) for operation in made] == [
        (TO_DEVICE, ()),
        (COMPUTE, (0,)),
        (TO_HOST, (1,)),
        (TO_DEVICE, ()),
        (COMPUTE, (3,)),
        (TO_HOST, (4,)),
        (TO_DEVICE, (2,)),  # the first buffer again
        (COMPUTE, (6,)),
        (TO_HOST, (7,)),
    ]
    assert {operation.name for operation in made} == {"backward"}


# --- plans ---

WIDTH = 512


@cache
def plan_of(budget: str = "0", accumulation: int = 1) -> Any:
    import lightning.pytorch as home

    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    batch = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    given = [f"callback.compact_states.state_budget={budget}", f"accumulate_grad_batches={accumulation}"]
    module = regression(home, nn.Sequential(*layers))
    return solo.plan(module, batch, preset="compact", overrides=given, device="h200")


def moved(plan: Plan, stream: str) -> float:
    """Return the bytes that the copies of a plan's timeline stand for."""
    return busy(plan.timeline, stream) * device("h200").host_bandwidth


@pytest.mark.parametrize("accumulation", [long(1), 2])
def test_a_preset_with_states_on_the_host_is_planned_with_its_copies(accumulation: int) -> None:
    plan = plan_of(accumulation=accumulation)
    layer = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16().weight
    states = 4 * sum(count * kind.itemsize for count, kind in state_layout(layer, 24, 8).values())
    for stream in (TO_DEVICE, TO_HOST):
        assert moved(plan, stream) == pytest.approx(states, rel=0.05)  # a picture's parts are a two-hundredth each
    assert {span.name for span in plan.timeline if span.stream == COMPUTE} >= {"forward", "backward"}
    assert Plan.from_dict(plan.as_dict()) == plan


def test_states_on_the_device_have_no_timeline() -> None:
    assert plan_of("null").timeline == ()


def test_the_picture_has_a_lane_per_stream() -> None:
    plan = plan_of(accumulation=2)
    figure = timelines([replace(plan, preset="a", timeline=()), plan])
    assert figure is not None
    assert {row[0].text for row in figure.table.rows} == {f"{plan.preset}, {stream}" for stream in STREAMS}
    assert "to host" in figure.alternative
    assert timelines([replace(plan, timeline=())]) is None
