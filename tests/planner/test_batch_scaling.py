"""Any micro-batch from traces of two: to the byte what a trace of its own gives, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_solo.memory.events import EventLog
from lightning_solo.planner import planner as planning
from lightning_solo.planner.batch_scaling import AffineTrace, affine_trace, canonical
from lightning_solo.planner.capture import Trace, capture
from lightning_solo.planner.device import device
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.replay import Capacities
from lightning_solo.planner.tracer import Cost
from lightning_solo.presets.compose import compose
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.units import GiB, MiB
from tests.conftest import long
from tests.planner.modules import Classifier, attending, convolutional, images, sequences, vectors


def byte_gpt(width: int = 16, depth: int = 2) -> ByteGPT:
    return ByteGPT(width=width, depth=depth, heads=2, context=12, dropout=0.1)


def text(size: int) -> Tensor:
    return torch.randint(256, (size, 13), dtype=torch.uint8)


MODULES: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "byte_gpt": (byte_gpt, text),
    "attending": (attending, sequences),
    "convolutional": (convolutional, images),
}


def trace(name: str, size: int, precision: str = "32-true", *, checkpointing: bool = False, cuda: bool = True) -> Trace:
    make, batch = MODULES[name]
    callbacks = [ActivationCheckpointing(verify_recomputation=False)] if checkpointing else []
    return capture(make, batch(size), {"precision": precision, "callbacks": callbacks}, cuda=cuda)


def of_two(name: str, precision: str = "32-true", *, checkpointing: bool = False, cuda: bool = True) -> AffineTrace:
    low, high = (trace(name, size, precision, checkpointing=checkpointing, cuda=cuda) for size in (2, 3))
    both = affine_trace(2, low, 3, high)
    assert both is not None
    return both


@pytest.mark.parametrize("power", [1, 2], ids=["linear", "pairs of examples"])
def test_single_example_may_lack_a_copy_but_has_no_other_sizes(power: int) -> None:
    def traced(size: int) -> Trace:
        sizes = [8 * size**power, *([] if size == 1 else [4 * size])]  # larger batches are copied to another layout
        log = EventLog([(storage, each) for storage, each in enumerate(sizes)], ["activations"] * len(sizes))
        return Trace(log, [(0, 0, "forward")], [Cost(0, each, torch.float32) for each in sizes], [])

    both = affine_trace(2, traced(2), 3, traced(3))
    assert both is not None
    assert not both.predicts(1, traced(1))
    assert both.contains(1, traced(1)) is (power == 1)


# --- equal to a trace of its own ---


@pytest.mark.parametrize("checkpointing", [long(False, id="plain"), pytest.param(True, id="checkpointing")])
@pytest.mark.parametrize("precision", [long("32-true"), "bf16-mixed", long("bf16-true")])
@pytest.mark.parametrize("name", [long("byte_gpt"), long("attending"), "convolutional"])
def test_scaled_trace_equals_own_trace(name: str, precision: str, checkpointing: bool) -> None:
    both = of_two(name, precision, checkpointing=checkpointing)
    for size in (7, 16) if checkpointing and precision == "bf16-mixed" else (16,):
        made, own = both.at(size), trace(name, size, precision, checkpointing=checkpointing)
        (peak, where), (own_peak, own_where) = made.log.peak(), canonical(own.log, own.phases).peak()
        assert peak == own_peak > 0
        assert made.log.breakdown(where) == canonical(own.log, own.phases).breakdown(own_where)
        assert Capacities(made.log, 2**20).smallest() == Capacities(canonical(own.log, own.phases), 2**20).smallest()
        assert [name for _, _, name in made.phases] == [name for _, _, name in own.phases]
        assert sum(cost.flops for cost in made.costs) == sum(cost.flops for cost in own.costs)
        assert sum(cost.bytes for cost in made.costs) == sum(cost.bytes for cost in own.costs)


@pytest.mark.long
def test_peak_is_not_linear_in_the_batch() -> None:
    both = of_two("byte_gpt")
    first, second, large = (both.at(size).log.peak()[0] for size in (2, 3, 64))
    assert large > 1.2 * (first + (second - first) * 62), "at first in the optimizer's step, then in backward"


# --- nothing where there is nothing to draw a line through ---


class Branches(Classifier):
    """Does more in a batch of more than two."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if len(x) > 2:
            x = x + x.exp().log()
        return nn.functional.cross_entropy(self.network(x), y)


def branches() -> Branches:
    return Branches(nn.Linear(16, 5))


def test_sizes_with_different_operators_give_no_affine_trace() -> None:
    traces = {size: capture(branches, vectors(size), {}) for size in (2, 3, 4)}
    assert affine_trace(2, traces[2], 3, traces[3]) is None
    assert affine_trace(3, traces[3], 4, traces[4]) is not None


def test_plan_says_that_sizes_run_different_operators() -> None:
    planner = Planner(branches, vectors(9), {}, device("cpu"), GiB)
    plan = planner.plan("baseline", compose("baseline"))
    assert any("2 and 3" in said and "micro_batch=" in said for said in plan.assumptions)
    assert plan.largest_micro_batch is None
    assert plan.peak_bytes == capture(branches, vectors(9), {"precision": "32-true"}, cuda=False).log.peak()[0]


@pytest.mark.parametrize("part", ["costs", "phases", "steps", "labels", "held"])
def test_each_part_of_two_traces_must_match(part: str) -> None:
    def made() -> Trace:
        log = EventLog([(1, 8), (1, -8)], ["weights", "activations"], {0: 4})
        return Trace(log, [(0, 0, "forward")], [], [0])

    assert affine_trace(2, made(), 3, made()) is not None
    other = made()
    if part == "costs":
        other.costs.append(capture_cost())
    elif part == "phases":
        other.phases.append((1, 0, "backward"))
    elif part == "steps":
        other.steps.append(0)
    elif part == "labels":
        other.log.labels[1] = "temporaries"
    else:
        other.log.held[2] = 4
        other.log.labels.append("other")
    assert affine_trace(2, made(), 3, other) is None


def capture_cost() -> Any:
    return capture(branches, vectors(2), {}).costs[0]


# --- the order of what goes at once ---


def test_consecutive_frees_are_sorted_and_storages_numbered() -> None:
    log = EventLog([(5, 8), (3, 4), (5, -8), (3, -4), (7, 2)], ["other"] * 8)
    log.labels[5], log.labels[3], log.labels[7] = "activations", "weights", "gradients"
    other = EventLog([(3, 8), (5, 4), (5, -4), (3, -8), (7, 2)], ["other"] * 8)
    other.labels[3], other.labels[5], other.labels[7] = "activations", "weights", "gradients"
    found = canonical(log, [])
    assert found.events == [(0, 8), (1, 4), (0, -8), (1, -4), (2, 2)]
    assert found == canonical(other, [])
    assert found.labels == ["activations", "weights", "gradients"]


def test_frees_are_sorted_within_a_phase() -> None:
    events = [(0, 1), (1, 2), (2, 4), (2, -4), (1, -2), (0, -1)]
    log = EventLog(events, ["other"] * 3)
    assert canonical(log, []).events == [*events[:3], (0, -1), (1, -2), (2, -4)]
    within = canonical(log, [(0, 0, "forward"), (5, 0, "between")])
    assert within.events == [*events[:3], (1, -2), (2, -4), (0, -1)]


def test_storages_from_before_have_the_first_numbers() -> None:
    log = EventLog([(2, 8), (9, -4)], ["activations"] * 9 + ["weights"], {9: 4})
    found = canonical(log, [])
    assert (found.held, found.events, found.labels[0]) == ({0: 4}, [(1, 8), (0, -4)], "weights")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms())
def test_order_of_consecutive_frees_changes_nothing(sizes: list[int], random: Any) -> None:
    births = list(enumerate(sizes))
    deaths = [(storage, -size) for storage, size in births]
    random.shuffle(deaths)
    log = EventLog([*births, *deaths], ["other"] * len(sizes))
    found = canonical(log, [])
    assert found.events == [*births, *sorted(deaths)]
    assert found.peak() == log.peak()


class Contrastive(Classifier):
    """Scores each example against each: what it holds grows with the square of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        z = self.network(x)
        return torch.nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


def contrastive() -> Contrastive:
    return Contrastive(torch.nn.Linear(16, 8))


@pytest.mark.parametrize("size", [1, *map(long, (2, 3, 64))])
def test_nonlinear_memory_is_planned_for_one_batch(size: int) -> None:
    batch = vectors(size)
    plan = Planner(contrastive, batch, {}, device("cpu"), GiB).plan("baseline", compose("baseline"))
    direct = capture(contrastive, batch, {"precision": "32-true"}, cuda=False)
    assert plan.peak_bytes == direct.log.peak()[0]
    assert size < 64 or plan.peak_bytes > 4 * 64 * 64 * 2
    assert plan.largest_micro_batch is None
    assert any("linear" in text for text in plan.assumptions)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, *map(long, (2, 3, 4, 9))])
def test_linear_memory_is_planned_for_all_batches(size: int) -> None:
    planner = Planner(byte_gpt, text(size), {}, device("cpu"), 4 * MiB)
    plan = planner.plan("baseline", compose("baseline"))
    direct = capture(byte_gpt, text(size), {"precision": "32-true"}, cuda=False)
    assert plan.peak_bytes == direct.log.peak()[0]
    assert plan.largest_micro_batch == largest_of_byte_gpt()


def test_single_example_that_does_not_fit_is_traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(make: Any, batch: Any, *arguments: Any, **given: Any) -> Trace:
        sizes.append(len(batch[0]))
        return capture(make, batch, *arguments, **given)

    monkeypatch.setattr(planning, "capture", counted)
    planner, larger = (Planner(wide, vectors(1), {}, device("rtx_4090"), budget) for budget in (2 * GiB, 4 * GiB))
    alone = planner.plan("bf16_true", compose("bf16_true"))
    assert sizes == [1]
    engine = planner.plan("zero_offload", compose("zero_offload"))
    assert set(sizes[1:]) > {1, 2}, "they have one trace; the engine has less beside it"
    assert (alone.verdict, alone.largest_micro_batch) == ("does not fit", 0)
    assert engine.verdict == "fits"
    assert (engine.largest_micro_batch or 0) > 1
    assert replace(larger.plan("tried", compose("bf16_true")), **judged(alone)) == alone


def judged(plan: Plan) -> dict[str, Any]:
    names = ("preset", "budget_bytes", "verdict", "largest_micro_batch", "reserved_bytes")
    return {name: getattr(plan, name) for name in names}


def wide() -> Classifier:
    """Return 268 M parameters: in bf16 with gradients and two states 4 x 2 bytes x 2**28 = 2 GiB."""
    return Classifier(nn.Sequential(nn.Linear(16, 8192), *(nn.Linear(8192, 8192) for _ in range(4))))


@cache
def largest_of_byte_gpt() -> int:
    """Return the largest micro-batch, one after the other."""
    room, size = int(4 * MiB / 1.05), 1
    both = of_two("byte_gpt", cuda=False)
    while both.at(size + 1).log.peak()[0] <= room:
        size += 1
    return size


@pytest.mark.long
def test_a_third_trace_is_on_the_line_or_not() -> None:
    for make, batch, expected in ((byte_gpt, text, True), (contrastive, vectors, False)):
        low, high, third = (capture(make, batch(size), {}) for size in (2, 9, 3))
        line = affine_trace(2, low, 9, high)
        assert line is not None
        assert line.predicts(9, high)
        assert line.predicts(3, third) is expected
