"""A solved plan with weights and states on the host takes the planned memory of the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.planner import solved_plan
from lightning_solo.planner.bases import WEIGHTS, settings_of
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.solved_plan import _Solver
from lightning_solo.planner.solver import evaluate, solve
from lightning_solo.presets.compose import compose
from lightning_solo.presets.writing import fields_of
from lightning_solo.units import GiB
from tests.simcuda.test_larger_than_the_device import Deep
from tests.simcuda.test_presets import QUIET

pytestmark = [pytest.mark.simcuda, pytest.mark.long, pytest.mark.filterwarnings("ignore:You are using a CUDA device")]


def test_peak_of_weights_on_the_host_is_the_planned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # threads of the simulated device don't survive a fork
    monkeypatch.setattr(solved_plan, "run_in_forks", lambda *functions: [function() for function in functions])
    # without attention, whose fused kernels the simulated device lacks
    make, batch = partial(Deep, 256, 8), torch.randn(1024, 8)
    card = replace(device("rtx_4090"), workspace_bytes=0, context_bytes=0)
    planner = Planner(make, batch, {}, card, GiB, host_memory=8 * GiB)
    base = compose("compact")
    solver = _Solver(planner, base)
    problem = solver._problem()
    everything = {name: part.bytes for name, part in problem.movables.items()}
    most = evaluate(problem, dict.fromkeys(problem.options, "keep")).peak
    least = evaluate(problem, dict.fromkeys(problem.options, "recompute"), everything).peak
    choice = solve(replace(problem, budget=int(least + 0.15 * (most - least))))
    assert choice.away[WEIGHTS] > 0
    config = solver._configured(choice)
    assert settings_of(config, WEIGHTS) is not None, "weights leave the device"
    planned = planner._memory(solver._trace(config), arrange(config, {}))["peak_bytes"]
    before, peaks = torch.cuda.memory_allocated(), []
    watch = L.callbacks.LambdaCallback(
        on_train_batch_start=lambda *_: torch.cuda.reset_peak_memory_stats(),
        on_train_batch_end=lambda *_: peaks.append(torch.cuda.max_memory_allocated() - before),
    )
    kwargs = {"accelerator": "cuda", **solo.trainer_kwargs(fields_of(config), callbacks=[watch])}
    trainer = L.Trainer(**{**kwargs, **QUIET, "default_root_dir": str(tmp_path), "max_steps": 3, "max_epochs": -1})
    trainer.fit(make(), DataLoader([batch] * 8, batch_size=None))
    assert max(peaks) == pytest.approx(planned, rel=0.03), (peaks, planned)
