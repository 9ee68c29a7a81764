"""The check of a plan by the first steps of its run: when it measures, and what it says."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_solo.memory.reading import Reading
from lightning_solo.planner import plan_check
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.plan_check import PlanCheck, difference
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.report.csv_files import read_metrics
from lightning_solo.report.run_folder import read_run
from lightning_solo.techniques.memory_logger.technique import MemoryLogger
from lightning_solo.units import GiB, MiB, format_bytes
from tests.messages import lines_with
from tests.planner.modules import plan_with


def planned(**fields: Any) -> Plan:
    return plan_with(
        **{"preset": "checkpointing", "breakdown": {"weights": GiB // 2, "activations": GiB // 2}, **fields}
    )


def byte_gpt() -> ByteGPT:
    return ByteGPT(width=16, depth=2, heads=2, context=64, warmup_steps=2)


def text(size: int) -> torch.Tensor:
    return torch.randint(256, (size, 65), dtype=torch.uint8)


@pytest.mark.parametrize(("peak", "said"), [(1.0, False), (1.09, False), (0.91, False), (1.11, True), (0.89, True)])
def test_difference_above_ten_percent_gives_a_message(peak: float, said: bool) -> None:
    plan = planned(peak_bytes=GiB)
    states = {"weights": 100 * MiB, "gradients": 200 * MiB, "optimizer_states": 0, "other": 7}
    message = difference(plan, int(peak * GiB), states)
    assert (message is not None) == said
    if message is not None:
        assert lines_with(message, "1.00 GiB", "checkpointing")
        assert "planned: weights 512.00 MiB, activations 512.00 MiB" in message
        assert "read: weights 100.00 MiB, gradients 200.00 MiB, activations" in message


class Counter:
    """A GPU's peak counter that this machine pretends to have: it reads what it is told to, and counts its resets."""

    def __init__(self, peak: int) -> None:
        self.peak, self.resets = peak, 0

    def read(self, device: torch.device) -> Reading:
        return Reading(peak_allocated=self.peak)

    def reset(self, device: torch.device) -> None:
        self.resets += 1


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    found = Counter(peak=2 * GiB)
    monkeypatch.setattr(plan_check, "read", found.read)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    return found


class Steps(L.Callback):
    """Notes after which batch of the fit the plan was found wrong; fails at a batch, if told to."""

    def __init__(self, said: list[warnings.WarningMessage], fails_at: int | None = None) -> None:
        self.said, self.fails_at, self.after = said, fails_at, []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(sum("auto planned a peak" in str(one.message) for one in self.said))
        if batch_idx == self.fails_at:
            raise KeyError("somebody's own")


def fitted(make_trainer: Any, check: PlanCheck, *others: Any, fails_at: int | None = None, **given: Any) -> list[int]:
    """Return how often it was said that the plan is wrong, after each batch."""
    checkpoint = given.pop("ckpt_path", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = Steps(said, fails_at)
        trainer = make_trainer(L.pytorch, **{"max_steps": 4, "callbacks": [*others, check, steps], **given})
        try:
            trainer.fit(byte_gpt(), DataLoader([text(4)] * 8, batch_size=None), ckpt_path=checkpoint, weights_only=True)
        except KeyError:
            assert fails_at is not None
        if "save" in str(trainer.default_root_dir):
            trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")
    return steps.after


def test_plan_is_compared_once_after_two_steps(make_trainer: Any, counter: Counter) -> None:
    assert fitted(make_trainer, PlanCheck(planned())) == [0, 1, 1, 1]
    assert counter.resets == 1
    assert fitted(make_trainer, PlanCheck(planned(peak_bytes=2 * GiB))) == [0, 0, 0, 0]


def test_comparison_counts_optimizer_steps(make_trainer: Any, counter: Counter) -> None:
    after = fitted(make_trainer, PlanCheck(planned()), accumulate_grad_batches=2)
    assert after == [0, 0, 0, 1, 1, 1, 1, 1]


def test_comparison_counts_from_the_start_of_a_resumed_run(make_trainer: Any, counter: Counter, tmp_path: Any) -> None:
    folder = tmp_path / "save"
    fitted(make_trainer, PlanCheck(planned()), max_steps=3, default_root_dir=str(folder))
    on = {"max_steps": 6, "max_epochs": 2, "ckpt_path": str(folder / "it.ckpt")}
    assert fitted(make_trainer, PlanCheck(planned()), **on) == [0, 1, 1]


@pytest.mark.parametrize("order", [0, 1])
def test_logger_that_resets_the_counter_prevents_the_comparison(
    make_trainer: Any, counter: Counter, order: int
) -> None:
    logger, check = MemoryLogger(per_phase=True, table=False), PlanCheck(planned())
    trainer_order = [logger, check][:: 1 if order else -1]
    after = fitted(make_trainer, check, callbacks=[*trainer_order, steps := Steps([])])
    assert (after, steps.after) == ([], [0, 0, 0, 0])
    assert counter.resets == 0
    assert fitted(make_trainer, check, MemoryLogger(table=False)) == [0, 1, 1, 1], "without per_phase it resets nothing"


def test_run_on_a_cpu_compares_no_plan_of_a_gpu(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[Any] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    assert fitted(make_trainer, PlanCheck(planned())) == [0, 0, 0, 0]
    assert not resets


@pytest.mark.parametrize("accumulation", [1, 2])
def test_peak_on_a_cpu_is_that_of_the_ledger(
    make_trainer: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, accumulation: int
) -> None:
    logger = MemoryLogger(category_steps=2, table=False)
    check = PlanCheck(planned(device="cpu", peak_bytes=MiB))
    given = {"logger": CSVLogger(tmp_path, name="", version=""), "accumulate_grad_batches": accumulation}
    with caplog.at_level("INFO"):
        after = fitted(make_trainer, check, logger, **given)
    assert after[accumulation : 2 * accumulation + 1] == [*([0] * (accumulation - 1)), 1, 1][: accumulation + 1]
    counted = logger.category_peak
    assert counted is not None
    metrics = read_metrics(tmp_path / "metrics.csv")
    assert metrics["plan/measured_peak_gib"].values == [pytest.approx(counted.bytes / GiB)]
    assert metrics["plan/planned_step_s"].values == [1.0]
    assert metrics["plan/measured_step_s"].values[0] > 0
    assert f"planned peak 1.00 MiB, measured {format_bytes(counted.bytes)}" in caplog.text
    assert "planned 1 s a step, measured" in caplog.text
    (table,) = (each for each in read_run(tmp_path).tables if each.caption == "Plan and measurement")
    assert [[cell.text for cell in row][:2] for row in table.rows] == [["peak gib", "0.00097656"], ["step s", "1"]]


def test_fit_after_an_exception_is_compared_anew(make_trainer: Any, counter: Counter) -> None:
    check = PlanCheck(planned())
    own = set(vars(check))  # Lightning hangs a `log` on it
    before = dict(vars(check))
    assert fitted(make_trainer, check, fails_at=0) == [0]
    assert {name: vars(check)[name] for name in own} == before
    assert fitted(make_trainer, check) == [0, 1, 1, 1]
    assert {name: vars(check)[name] for name in own} == before
