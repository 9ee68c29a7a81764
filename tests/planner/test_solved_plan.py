"""A solved plan: its tables against traces of mixed modes, and its peak against that of a real fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_solo.attach import trainer_kwargs
from lightning_solo.planner.bases import Bases, configuration_of
from lightning_solo.planner.block_marks import BACKWARD, FORWARD
from lightning_solo.planner.block_tables import block_table, problem_of
from lightning_solo.planner.device import device
from lightning_solo.planner.plan import TIGHT, verdict_of
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.solved_plan import _Solver, solved, with_modes
from lightning_solo.planner.solver import Call, Choice, Option, Problem, evaluate
from lightning_solo.presets.compose import compose
from lightning_solo.presets.writing import fields_of
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import GiB
from tests.modules import Held
from tests.planner.modules import plan_with

NAMES = [f"blocks.{number}" for number in range(4)]


def text(size: int) -> torch.Tensor:
    return torch.randint(256, (size, 65), dtype=torch.uint8)


def make(depth: int = 4) -> ByteGPT:
    return ByteGPT(width=32, depth=depth, heads=2, context=64, warmup_steps=2)


@pytest.mark.parametrize("on", ["cpu", pytest.param("rtx_4090", marks=pytest.mark.long)])
def test_tables_of_equal_modes_predict_peaks_of_mixed_ones(on: str) -> None:
    modules: list[ByteGPT] = []

    def recorded() -> ByteGPT:
        modules.append(make())
        return modules[-1]

    planner = Planner(recorded, text(4), {}, device(on), GiB)
    base = replace(compose("baseline"), precision="32-true")
    keep = planner.captured(arrange(base, {}))
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in modules[-1].blocks)
    traces = {"keep": keep}
    for mode in ("products", "recompute"):
        traces[mode] = planner.captured(arrange(with_modes(base, {mode: NAMES}), {}))
    last = [(mark.kind, mark.block) for mark in keep.marks if mark.kind != "after"][-8:]
    assert last == [*((FORWARD, name) for name in NAMES), *((BACKWARD, name) for name in reversed(NAMES))]
    problem = problem_of({mode: block_table(trace, planner.device) for mode, trace in traces.items()}, GiB, None)
    for mode, trace in traces.items():
        assert evaluate(problem, dict.fromkeys(NAMES, mode)).peak == trace.log.peak()[0]
    mixed = {"keep": [NAMES[1]], "products": [NAMES[2]], "recompute": [NAMES[0], NAMES[3]]}
    real = planner.captured(arrange(with_modes(base, mixed), {}))
    modes = {name: mode for mode, names in mixed.items() for name in names}
    assert evaluate(problem, modes).peak == pytest.approx(real.log.peak()[0], rel=0.03)
    kept, again = problem.calls[0].options["keep"], problem.calls[0].options["recompute"]
    assert again.kept < problem.calls[0].options["products"].kept < kept.kept
    assert again.backward_s > kept.backward_s


def test_choice_becomes_a_preset_of_modes_and_budgets() -> None:
    base = compose("compact")
    solver = _Solver(Planner(make, text(4), {}, device("rtx_4090"), GiB), Bases({"compact": base}), base)
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
    solver = _Solver(planner, Bases({"baseline": base}, accept_tight=True), base)
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

    def captured(config: Any) -> SimpleNamespace:
        modes = [each.settings.modes for each in config.techniques if each.card.solved == "modes"]
        kept = len(modes[0].get("keep", ())) if modes else 4
        return SimpleNamespace(kept=kept, host_bytes=kept * 63 + 10)  # the tables say 60

    monkeypatch.setattr(solver, "_problem", lambda: problem)
    monkeypatch.setattr("lightning_solo.planner.solved_plan.arrange", lambda config, trainer: config)
    monkeypatch.setattr(planner, "captured", captured)
    monkeypatch.setattr(planner, "costs", costs)
    monkeypatch.setattr(
        planner, "plan", lambda name, config: plan_with(preset=name, needed_bytes=costs(None, captured(config))[0])
    )
    plan = solver.plan()
    assert tried[0] > tried[1], tried
    assert plan.needed_bytes <= planner.budget
    assert host is None or tried[-1] * 63 + 10 <= host


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
    arguments = trainer_kwargs(result.configuration, callbacks=[watch])
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fit: Any = L.Trainer(accelerator="cpu", max_steps=3, enable_model_summary=False, **{**arguments, **quiet})
    fit.fit(larger(), DataLoader([batch] * 8, batch_size=None))
    assert watch.peak_bytes == pytest.approx(result.peak_bytes, rel=0.03)
