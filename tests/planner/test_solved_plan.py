"""A solved plan: its tables against traces of mixed modes, and its peak against that of a real fit."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_solo.attach import trainer_kwargs
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import PlanError
from lightning_solo.planner.bases import (
    BLOCK_MICRO_BATCHES,
    MICRO_BATCH,
    STATES,
    WEIGHTS,
    Bases,
    configuration_of,
    settings_of,
    solved_lines,
    with_modes,
)
from lightning_solo.planner.block_marks import BACKWARD, FORWARD
from lightning_solo.planner.block_tables import block_table, problem_of
from lightning_solo.planner.device import device
from lightning_solo.planner.micro_batch_sizes import ScaledTraces, divided
from lightning_solo.planner.plan import TIGHT, Plan, verdict_of
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.solved_plan import _Solver, solved
from lightning_solo.planner.solver import Call, Choice, Option, Problem, _Tables, evaluate, solve
from lightning_solo.presets.compose import compose
from lightning_solo.presets.writing import fields_of
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import GiB, MiB
from tests.messages import mentions
from tests.modules import Held
from tests.planner.modules import plan_with

NAMES = [f"blocks.{number}" for number in range(4)]


def text(size: int) -> torch.Tensor:
    return torch.randint(256, (size, 65), dtype=torch.uint8)


def make(depth: int = 4) -> ByteGPT:
    return ByteGPT(width=32, depth=depth, heads=2, context=64, warmup_steps=2)


def fit(module: L.LightningModule, batch: Any, fields: Mapping[str, Any], *callbacks: Any) -> None:
    """Train for three steps with the fields of a preset."""
    arguments = trainer_kwargs(fields, callbacks=[*callbacks])
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer: Any = L.Trainer(accelerator="cpu", max_steps=3, enable_model_summary=False, **{**arguments, **quiet})
    trainer.fit(module, DataLoader([batch] * 8, batch_size=None))


@pytest.mark.parametrize("on", ["cpu", pytest.param("rtx_4090", marks=pytest.mark.long)])
def test_tables_of_equal_modes_predict_peaks_of_mixed_ones(on: str) -> None:
    modules: list[ByteGPT] = []

    def recorded() -> ByteGPT:
        modules.append(make())
        return modules[-1]

    planner = Planner(recorded, text(4), {}, device(on), GiB)
    base = replace(compose("baseline"), precision="32-true")
    keep = planner.captured(arrange(base, {}), 4)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in modules[-1].blocks)
    traces = {"keep": keep}
    for mode in ("products", "recompute"):
        traces[mode] = planner.captured(arrange(with_modes(base, {mode: NAMES}), {}), 4)
    last = [(mark.kind, mark.block) for mark in keep.marks if mark.kind != "after"][-8:]
    assert last == [*((FORWARD, name) for name in NAMES), *((BACKWARD, name) for name in reversed(NAMES))]
    problem = problem_of({mode: block_table(trace, planner.device) for mode, trace in traces.items()}, GiB, None)
    for mode, trace in traces.items():
        assert evaluate(problem, dict.fromkeys(NAMES, mode)).peak == trace.log.peak()[0]
    mixed = {"keep": [NAMES[1]], "products": [NAMES[2]], "recompute": [NAMES[0], NAMES[3]]}
    real = planner.captured(arrange(with_modes(base, mixed), {}), 4)
    modes = {name: mode for mode, names in mixed.items() for name in names}
    assert evaluate(problem, modes).peak == pytest.approx(real.log.peak()[0], rel=0.03)
    kept, again = problem.calls[0].options["keep"], problem.calls[0].options["recompute"]
    assert again.kept < problem.calls[0].options["products"].kept < kept.kept
    assert again.backward_s > kept.backward_s


def test_choice_becomes_a_preset_of_modes_and_budgets() -> None:
    base = compose("compact")
    solver = _Solver(Planner(make, text(4), {}, device("rtx_4090"), GiB), base)
    solver._resident = {"optimizer_states": 300, "weights": 200}
    solver._slabs = 1000
    modes = {"blocks.0": "recompute", "blocks.1": "offload", "blocks.2": "keep"}
    config = solver._configured(Choice(modes, {"state_budget": 100, "weight_budget": 150}, 0, 0, 0.0))
    added = {chosen.card.solved: chosen.settings for chosen in config.techniques if chosen.card.solved}
    assert added["modes"].modes == {"keep": ["blocks.2"], "recompute": ["blocks.0"], "offload": ["blocks.1"]}
    assert (added["state_budget"].state_budget, added["weight_budget"].weight_budget) == (200, 50)
    assert "moving" in added
    assert compose(fields_of(config)) == config
    assert solver._configured(Choice(dict.fromkeys(modes, "keep"), {}, 0, 0, 0.0)) == base
    solver._slabs = 201  # padded; a budget of 0 would be less than the weights outside the blocks
    every = solver._configured(Choice(modes, {"weight_budget": 200}, 0, 0, 0.0))
    assert {chosen.settings.weight_budget for chosen in every.techniques if chosen.card.solved == "weight_budget"} == {
        None
    }
    assert compose(fields_of(every)) == every


@pytest.mark.parametrize(("budget", "host", "more"), [(1050, None, 30), (10**6, 250, 0)])
def test_traced_bytes_above_the_tables_correct_the_next_round(
    monkeypatch: pytest.MonkeyPatch, budget: int, host: int | None, more: int
) -> None:
    base = replace(compose("baseline"), precision="32-true")
    planner = Planner(make, text(4), {}, device("cpu"), budget)
    solver = _Solver(planner, base)
    solver._budget, solver._host = budget, host
    options = {
        "keep": Option(100, 100, 5, 1, 2, 0 if host is None else 60),
        "recompute": Option(0, 20, 100, 1, 3),
    }
    calls = [Call(name, options) for name in NAMES]
    problem = Problem(calls, [3, 2, 1, 0], 700, 0, 0, {}, budget, host)
    tried: list[int] = []

    def costs(arranged: Any, trace: SimpleNamespace) -> tuple[int, float]:
        tried.append(trace.kept)
        return 730 + 100 * trace.kept + (70 + more if trace.kept < 4 else 0), 12.0 - trace.kept

    def captured(config: Any, size: int = 4) -> SimpleNamespace:
        modes = [each.settings.modes for each in config.techniques if each.card.solved == "modes"]
        kept = len(modes[0].get("keep", ())) if modes else 4
        return SimpleNamespace(kept=kept, host_bytes=kept * 63 + 10)  # the tables say 60

    monkeypatch.setattr(solver, "_problem", lambda: problem)
    monkeypatch.setattr(solver, "_arranged", lambda config: config)
    monkeypatch.setattr(planner, "captured", captured)
    monkeypatch.setattr(planner, "costs", costs)
    monkeypatch.setattr(
        planner, "plan", lambda name, config: plan_with(preset=name, needed_bytes=costs(None, captured(config))[0])
    )
    plan = solver.plan()
    assert tried[0] > tried[1], tried
    assert plan.needed_bytes <= planner.budget
    assert host is None or tried[-1] * 63 + 10 <= host


@pytest.mark.parametrize(
    ("again", "size", "kept"), [(0.2, 8, 1), (0.7, 4, 3), (2.0, 2, 4)], ids=["whole batch", "larger", "all kept"]
)
def test_fastest_of_micro_batches_and_recomputation_is_solved(
    monkeypatch: pytest.MonkeyPatch, again: float, size: int, kept: int
) -> None:
    """A call takes 0.2 s and 1/8 s per sample, and ``again`` times as much if it is recomputed."""
    planner, base = Planner(make, text(8), {}, device("cpu"), 1470), replace(compose("baseline"), precision="32-true")

    def tables(size: int) -> Problem:
        seconds = 8 / size * (0.2 + size / 8)
        keep = Option(100 * size, 100 * size, 0, seconds, 0)
        options = {"keep": keep, "recompute": Option(10 * size, 10 * size, 0, seconds, again * seconds)}
        return Problem([Call(name, options) for name in NAMES], [3, 2, 1, 0], 0, 0, 0, {}, 1400)

    def traced(config: Configuration, size: int) -> SimpleNamespace:
        by_mode = (settings_of(config, "modes") and settings_of(config, "modes").modes) or {"keep": NAMES}
        modes = {name: mode for mode, names in by_mode.items() for name in names}
        return SimpleNamespace(choice=evaluate(tables(size), modes), host_bytes=0)

    def planned(name: str, config: Configuration) -> Plan:
        size = settings_of(config, MICRO_BATCH).micro_batch if settings_of(config, MICRO_BATCH) else 8
        choice = traced(config, size).choice
        fields = {"needed_bytes": choice.peak, "seconds_per_step": choice.seconds}
        return plan_with(preset=name, micro_batch=size, accumulation=8 // size, **fields)

    monkeypatch.setattr(_Solver, "_problem", lambda self: tables(self._size))
    monkeypatch.setattr(_Solver, "_arranged", lambda self, config: config)
    monkeypatch.setattr(
        ScaledTraces, "at", lambda self, configs, size: {name: traced(each, size) for name, each in configs.items()}
    )
    monkeypatch.setattr(planner, "captured", traced)
    monkeypatch.setattr(planner, "costs", lambda config, trace: (trace.choice.peak, trace.choice.seconds))
    monkeypatch.setattr(planner, "plan", planned)
    lacking = {"baseline": plan_with(preset="baseline", verdict="does not fit", breakdown={})}
    result = solved(planner, Bases({"baseline": base}), lacking)
    written = configuration_of(result)
    assert (result.micro_batch, result.accumulation) == (size, 8 // size)
    assert (settings_of(written, MICRO_BATCH) is None) == (size == 8)
    modes = settings_of(written, "modes")
    assert len(NAMES if modes is None else modes.modes["keep"]) == kept
    assert solved(planner, Bases({"baseline": base}, whole_batch=True), lacking).micro_batch == 8


@pytest.mark.parametrize(("budget", "kept"), [(1071, 2), (1039, 3), (1025, 2), (990, 0)])  # 1071: 1020 and 5 %
def test_fastest_plan_that_fits_tightly_is_solved_if_none_leaves_the_reserve(
    monkeypatch: pytest.MonkeyPatch, budget: int, kept: int
) -> None:
    """The module takes 1000 bytes. Each of its four blocks takes 10 more unless it is recomputed."""
    planner, base = Planner(make, text(4), {}, device("cpu"), budget), replace(compose("baseline"), precision="32-true")
    options = {"keep": Option(10, 10, 0, 1, 2), "recompute": Option(0, 0, 0, 1, 3)}
    tables = Problem([Call(name, options) for name in NAMES], [3, 2, 1, 0], 1000, 0, 0, {}, 0)

    def choice(config: Configuration) -> Choice:
        by_mode = (settings_of(config, "modes") and settings_of(config, "modes").modes) or {"keep": NAMES}
        return evaluate(tables, {name: mode for mode, names in by_mode.items() for name in names})

    def planned(name: str, config: Configuration) -> Plan:
        needed, seconds = choice(config).peak, choice(config).seconds
        fields = {"budget_bytes": budget, "verdict": verdict_of(needed, budget), "seconds_per_step": seconds}
        return plan_with(preset=name, needed_bytes=needed, breakdown={}, **fields)

    monkeypatch.setattr(_Solver, "_problem", lambda self: replace(tables, budget=self._budget))
    monkeypatch.setattr(_Solver, "_arranged", lambda self, config: config)
    monkeypatch.setattr(planner, "captured", lambda config, size: SimpleNamespace(choice=choice(config), host_bytes=0))
    monkeypatch.setattr(planner, "costs", lambda _, trace: (trace.choice.peak, trace.choice.seconds))
    monkeypatch.setattr(planner, "plan", planned)
    bases = Bases({"baseline": base}, whole_batch=True)
    result = solved(planner, bases, {"baseline": planned("baseline", base)})
    assert (result.needed_bytes, result.verdict) == (1000 + 10 * kept, verdict_of(1000 + 10 * kept, budget))
    planner.budget = budget = 1040
    with pytest.raises(PlanError, match=mentions("baseline fits tightly")):
        solved(planner, bases, {"baseline": planned("baseline", base)})


@pytest.mark.parametrize(("others", "traces"), [(0.0, 2), (1000.0, 1)])
def test_choice_that_is_hardly_faster_is_not_traced(
    monkeypatch: pytest.MonkeyPatch, others: float, traces: int
) -> None:
    """The first choice takes 10 bytes less than its tables, which is room for one block more to be kept: 1 s less."""
    planner, base = Planner(make, text(4), {}, device("cpu"), GiB), replace(compose("baseline"), precision="32-true")
    options = {"keep": Option(10, 10, 0, 1, 2), "recompute": Option(0, 0, 0, 1, 3)}
    tables = Problem([Call(name, options) for name in NAMES], [3, 2, 1, 0], 1000, 0, 0, {"forward": others}, 1020)
    tried: list[float] = []

    def captured(config: Configuration, size: int) -> SimpleNamespace:
        by_mode = settings_of(config, "modes").modes
        choice = evaluate(tables, {name: mode for mode, names in by_mode.items() for name in names})
        tried.append(choice.seconds)
        return SimpleNamespace(choice=choice, host_bytes=0)

    solver = _Solver(planner, base)
    solver._budget = 1020
    monkeypatch.setattr(solver, "_problem", lambda: tables)
    monkeypatch.setattr(solver, "_arranged", lambda config: config)
    monkeypatch.setattr(planner, "captured", captured)
    monkeypatch.setattr(planner, "costs", lambda _, trace: (trace.choice.peak - 10, trace.choice.seconds))
    monkeypatch.setattr(planner, "plan", lambda name, config: plan_with(preset=name, seconds_per_step=tried[-1]))
    assert solver.plan().seconds_per_step == min(tried)
    assert tried == [others + 14, others + 13][:traces]


def test_plan_takes_a_marked_trace_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(make, text(4), {}, device("cpu"), GiB)
    config = with_modes(replace(compose("baseline"), precision="32-true"), {"recompute": NAMES[:2]})
    trace = planner.captured(arrange(config, {}), 4)
    monkeypatch.setattr(planner, "_captured", None)
    plan = planner.plan("solved", config)
    assert (plan.peak_bytes, plan.largest_micro_batch) == (trace.log.peak()[0], None)
    monkeypatch.undo()
    traces = {*planner._traces}
    planner.captured(arrange(divided(config, 2), {}), 2)
    assert {*planner._traces} == traces, "a smaller micro-batch may have to be found"


def test_no_plan_is_solved_from_a_preset_whose_weights_and_states_are_larger_than_the_device() -> None:
    planner = Planner(make, text(4), {}, device("rtx_4090"), GiB)
    held = {"weights": 6 * GiB, "gradients": 6 * GiB, "optimizer_states": 12 * GiB}
    configs = {name: compose(name) for name in ("bf16", "compact")}
    lacking = {name: plan_with(preset=name, verdict="does not fit", breakdown=held) for name in configs}
    planner._captured = None  # type: ignore[assignment, method-assign]  # nothing is traced
    with pytest.raises(
        PlanError, match=mentions("bf16", "6.00 GiB of weights", "12.00 GiB of optimizer states", "1.00 GiB")
    ):
        solved(planner, Bases({"bf16": configs["bf16"]}), lacking)
    # weights and states of `compact` may leave the device
    assert _Solver(planner, configs["compact"]).fixed(lacking["compact"]) == {}
    planner.trainer = {"gradient_clip_val": 1.0}
    assert _Solver(planner, configs["compact"]).fixed(lacking["compact"]) == {"weights": 6 * GiB}


def test_micro_batch_of_a_solved_plan_is_written_as_it_is_described() -> None:
    planner, base = Planner(partial(Uneven, (64,)), torch.zeros(8, 64, 64), {}, device("cpu"), GiB), compose("baseline")
    config = divided(base, 4)
    needed = planner.plan("all", config).needed_bytes
    for budget, described, verdict in ((needed, 4, "tight"), (needed - 1, 3, "fits")):
        planner.budget = budget
        plan = _Solver(planner, base, 4, ScaledTraces(planner)).planned(config)
        assert (plan.micro_batch, plan.verdict) == (described, verdict)
        assert solved_lines(configuration_of(plan)) == [f"callback.micro_batching.micro_batch={described}"]


@pytest.mark.parametrize(("most", "number"), [(1, 8), (600, 8), (1200, 4), (2500, 2)])
def test_blocks_run_in_the_fewest_micro_batches_that_fit_if_no_whole_batch_does(
    monkeypatch: pytest.MonkeyPatch, most: int, number: int
) -> None:
    base = compose("compact")
    planner = Planner(make, text(8), {}, device("rtx_4090"), most, host_memory=GiB)

    def planned(name: str, config: Configuration) -> Plan:
        divided = settings_of(config, BLOCK_MICRO_BATCHES)
        needed = 4000 // (1 if divided is None else divided.micro_batches)
        fields = {"needed_bytes": needed, "budget_bytes": most, "verdict": verdict_of(needed, most), "host_bytes": 0}
        fields["breakdown"] = {}
        return plan_with(preset=name, micro_batch=8, seconds_per_step=1.0, **fields)

    lacking = replace(planned("compact", base), largest_micro_batch=None)  # not linear: no ordinary micro-batches
    monkeypatch.setattr(_Solver, "plan", lambda self: planned("solved", self.base))
    monkeypatch.setattr(_Solver, "_trace", lambda self, config: SimpleNamespace(config=config, host_bytes=0))
    monkeypatch.setattr(planner, "costs", lambda _, trace: (planned("", trace.config).needed_bytes, 1.0))
    monkeypatch.setattr(planner, "plan", planned)
    bases = Bases({"compact": base})
    result = solved(planner, bases, {"compact": lacking})
    config = configuration_of(result)
    assert result.needed_bytes == 4000 // number
    assert (result.needed_bytes <= most) == (most > 1)
    assert settings_of(config, BLOCK_MICRO_BATCHES).micro_batches == number
    assert f"callback.block_micro_batching.micro_batches={number}" in solved_lines(config)
    assert (settings_of(config, STATES).state_budget, settings_of(config, WEIGHTS).weight_budget) == (0, None)
    assert settings_of(config, "moving") is not None
    whole = replace(bases, whole_batch=True)
    assert solved(planner, whole, {"compact": lacking}).needed_bytes == 4000
    planner.budget = most = 4200  # 4000 and 5 %
    assert solved(planner, bases, {"compact": lacking}).configuration is None, "a whole batch fits"
    with pytest.raises(PlanError, match="fits as it is"):
        solved(planner, bases, {"compact": replace(lacking, verdict="fits")})
    # the fastest and the smallest lack memory, and one between them fits, faster than what is solved
    between = replace(lacking, preset="bf16", verdict="fits", needed_bytes=3000, seconds_per_step=0.9)
    plans = {"compact": replace(lacking, seconds_per_step=0.5), "bf16": between}
    both = replace(bases, bases={"compact": base, "bf16": compose("bf16")})
    for seconds in (0.9, 1.0):
        with pytest.raises(PlanError, match=mentions("bf16 fits as it is", "less time")):
            solved(planner, both, {**plans, "bf16": replace(between, seconds_per_step=seconds)})
    assert solved(planner, both, {**plans, "bf16": replace(between, seconds_per_step=2.0)}).preset == "solved"


@pytest.mark.long
@pytest.mark.parametrize("on", ["cpu", "rtx_4090"])
def test_micro_batches_within_blocks_train_as_planned_where_no_whole_batch_fits(on: str) -> None:
    module, batch = partial(Normalized, [1024] * 3), torch.randn(128, 64, 64)
    base = replace(compose("gradient_release"), precision="32-true")
    card = replace(device(on), context_bytes=0, workspace_bytes=0)  # which are larger than the module
    planner = Planner(module, batch, {}, card, 8 * MiB, host_memory=GiB)  # room for weights and states alone
    open_ones, plans = Bases({"gradient_release": base}), {"gradient_release": planner.plan("gradient_release", base)}
    nearest = solved(planner, replace(open_ones, whole_batch=True), plans)
    planner.budget = int(0.9 * nearest.needed_bytes)
    result = solved(planner, open_ones, plans)
    assert result.verdict == "fits"
    config = configuration_of(result)
    assert settings_of(config, BLOCK_MICRO_BATCHES) is not None
    assert (settings_of(config, WEIGHTS) is not None) == (on != "cpu")
    fields = copy.deepcopy(result.configuration)
    assert fields is not None
    if on != "cpu":
        fields["callback"]["activation_offloading"]["allow_cpu"] = True
    watch, divided = Held(), module()
    plain = copy.deepcopy(divided)
    fit(divided, batch, fields, watch)
    if on == "cpu":
        assert watch.peak_bytes == pytest.approx(result.peak_bytes, rel=0.03)
    fit(plain, batch, {"precision": "32-true"})
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(weight, divided.get_parameter(name), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("width", "is_divided"), [(256, True), (64, False)])
def test_micro_batches_are_solved_if_they_are_faster(width: int, is_divided: bool) -> None:
    module, batch = partial(ByteGPT, width=width, depth=4, heads=2, context=64, warmup_steps=2), text(8)
    base = replace(compose("baseline"), precision="32-true")
    planner = Planner(module, batch, {}, device("cpu"), GiB)
    plan = planner.plan("baseline", base)
    checkpointed = planner.plan("checkpointing", replace(compose("checkpointing"), precision="32-true"))
    planner.budget = int((0.6 * checkpointed.needed_bytes + 0.4 * plan.needed_bytes) * (1 + TIGHT))
    plans = {"baseline": replace(plan, verdict=verdict_of(plan.needed_bytes, planner.budget))}
    result = solved(planner, Bases({"baseline": base}), plans)
    whole = solved(planner, Bases({"baseline": base}, whole_batch=True), plans)
    assert (result.verdict, whole.verdict) == ("fits", "fits")
    assert (whole.micro_batch, whole.accumulation) == (8, 1)
    assert (result.micro_batch < 8) == is_divided
    assert result.micro_batch * result.accumulation == result.batch == 8
    assert result.seconds_per_step <= 1.02 * whole.seconds_per_step + 1e-3
    if not is_divided:
        assert result == whole
        return
    assert result.seconds_per_step < whole.seconds_per_step
    assert result.configuration is not None
    assert f"callback.micro_batching.micro_batch={result.micro_batch}" in solved_lines(configuration_of(result))
    watch, divided = Held(), module()
    plain = copy.deepcopy(divided)
    fit(divided, batch, result.configuration, watch)
    assert watch.peak_bytes == pytest.approx(result.peak_bytes, rel=0.03)
    fit(plain, batch, {"precision": "32-true"})
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(weight, divided.get_parameter(name), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.35, 0.85])
def test_solved_plan_counts_as_planned_and_is_no_slower_than_presets(share: float) -> None:
    larger, batch = partial(ByteGPT, width=64, depth=6, heads=2, context=64, warmup_steps=2), text(16)
    names = ["baseline", "checkpointing", "checkpointing_selective"]
    configs = {name: replace(compose(name), precision="32-true") for name in names}
    planner = Planner(larger, batch, {}, device("cpu"), GiB)
    plans = {name: planner.plan(name, config) for name, config in configs.items()}
    least, most = plans["checkpointing"].needed_bytes, plans["baseline"].needed_bytes
    planner.budget = budget = int((least + share * (most - least)) * (1 + TIGHT))
    plans = {name: replace(plan, verdict=verdict_of(plan.needed_bytes, budget)) for name, plan in plans.items()}
    result = solved(planner, Bases({"baseline": configs["baseline"]}), plans)
    assert result.verdict == "fits"
    fitting = [plan.seconds_per_step for plan in plans.values() if plan.verdict == "fits"]
    assert result.seconds_per_step < min(fitting)
    config = configuration_of(result)
    (modes,) = [chosen.settings.modes for chosen in config.techniques if chosen.card.solved == "modes"]
    assert len(modes) > 1, "blocks differ"
    watch = Held()
    assert result.configuration is not None
    fit(larger(), batch, result.configuration, watch)
    assert watch.peak_bytes == pytest.approx(result.peak_bytes, rel=0.03)


class Uneven(L.LightningModule):
    """Residual blocks of unequal sizes."""

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Bottleneck(64, size) for size in hidden])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Normalized(Uneven):
    """Blocks after a layer that takes the statistics of the whole batch, which ordinary micro-batches would change."""

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__(hidden)
        self.stem = nn.BatchNorm1d(64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(self.stem(batch), batch_idx)


class Bottleneck(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


SIZES = (1024, 64, 256, 768, 128, 512, 96, 896, 320, 192, 640, 448)


def traced(make: Callable[[], Any], batch: Any, preset: str) -> Problem:
    """Return the tables of a module's traces on a GPU that is slow enough for its copies."""
    card = replace(device("rtx_4090"), host_bandwidth=2e9)
    planner = Planner(make, batch, {}, card, 10 * GiB, host_memory=64 * GiB)
    return _Solver(planner, compose(preset))._problem()


def test_states_that_are_too_small_to_leave_the_device_are_no_choice() -> None:
    problem = traced(partial(Uneven, (32, 48)), torch.zeros(64, 64), "compact")
    assert [*problem.movables] == ["weight_budget"]


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    gpt = partial(ByteGPT, width=128, depth=12, heads=2, context=64, warmup_steps=2)
    return {
        "unequal": traced(partial(Uneven, SIZES), torch.zeros(16384, 64), "compact"),
        "equal": traced(gpt, text(64), "compact"),
    }


@pytest.mark.long
@pytest.mark.parametrize("highs", [True, False], ids=["highs", "search"])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("kind", ["unequal", "equal"])
def test_no_random_plan_of_a_traced_module_is_faster(
    problems: dict[str, Problem], kind: str, share: float, highs: bool
) -> None:
    problem = problems[kind]
    assert len(problem.options) == 12
    assert {"keep", "products", "recompute", "host_input", "offload"} == {*problem.calls[0].options}
    assert problem.movables
    tables = _Tables(problem)
    alone = [evaluate(problem, dict.fromkeys(problem.options, mode)).peak for mode in tables.modes]
    problem = replace(problem, budget=int(min(alone) + share * (max(alone) - min(alone))))
    tables, draw = _Tables(problem), np.random.default_rng(round(100 * share))
    best, tried = float("inf"), 0
    while tried < 500:
        weights = draw.random(len(tables.modes)) ** 3
        columns = draw.choice(len(tables.modes), len(tables.blocks), p=weights / weights.sum())
        away = {
            name: (draw.integers(2) if part.is_whole else draw.integers(5) / 4) * part.bytes
            for name, part in problem.movables.items()
        }
        away = {name: size for name, size in away.items() if size}
        if tables.fits(columns, away):
            tried, best = tried + 1, min(best, tables.seconds(columns, away))
    begin = time.process_time()
    choice = solve(problem, highs=highs)
    assert time.process_time() - begin < 10  # a runaway search, not a figure
    assert choice.peak <= problem.budget
    assert choice.seconds <= 1.02 * best


@pytest.mark.long
def test_plan_of_four_traced_blocks_is_the_fastest_of_all() -> None:
    problem = traced(partial(Uneven, SIZES[:4]), torch.zeros(4096, 64), "bf16")
    tables = _Tables(problem)
    every = [np.array(columns) for columns in itertools.product(range(len(tables.modes)), repeat=4)]
    assert len(every) == 5**4
    peaks = [tables.peak(columns, {}) for columns in every]
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        budget = int(min(peaks) + share * (max(peaks) - min(peaks)))
        best = min(tables.seconds(each, {}) for each, peak in zip(every, peaks, strict=True) if peak <= budget)
        for highs, slack in ((True, 1.006), (False, 1.02)):
            choice = solve(replace(problem, budget=budget), highs=highs)
            assert choice.peak <= budget
            assert choice.seconds <= slack * best
