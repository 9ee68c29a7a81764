"""What a job's observer keeps of fits and tests for the sweep's table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_solo.atomic_files import read_json
from lightning_solo.sweeps.files import JobFiles
from lightning_solo.sweeps.job_process import VARIABLE
from lightning_solo.sweeps.observer import JobObserver, job_metrics


class LogsLosses(L.LightningModule):
    """Logs a loss of each kind, and one that only the first fit logs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fits = torch.nn.Parameter(torch.ones(1)), 0

    def on_fit_start(self) -> None:
        self.fits += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/loss", 1.0)
        self.log(f"fit_{self.fits}", 1.0)
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 2.0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", 3.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_resumed_fit_that_had_ended_keeps_the_metrics_of_the_attempt_before(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, job = DataLoader(torch.zeros(2, 1)), tmp_path / "a" / "b" / "0"
    job.mkdir(parents=True)
    files, module = JobFiles(job), LogsLosses()
    fitting = make_trainer(L, callbacks=[JobObserver(job)], max_epochs=1)
    fitting.fit(module, data, data)
    fitting.save_checkpoint(tmp_path / "last.ckpt")
    files.progress.replace(files.former)  # as a sweep does before the job's next attempt
    for epochs in (1, 2):
        module.fits = 1
        again = make_trainer(L, callbacks=[JobObserver(job)], max_epochs=epochs)
        again.fit(module, data, data, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
        expected = {"train/loss": 1.0, f"fit_{epochs}": 1.0, "val/loss": 2.0}
        progress = read_json(files.progress) or {}
        assert (progress["metrics"], progress["step"]) == (expected, 2 * epochs)
    assert job_metrics() == {}
    monkeypatch.setenv(VARIABLE, str(job))
    assert job_metrics() == expected


@pytest.mark.parametrize("testing", ["the same Trainer", "another Trainer"])
def test_a_test_adds_its_metrics_to_those_of_the_fit(
    make_trainer: Callable[..., Any], tmp_path: Path, testing: str
) -> None:
    data, module = DataLoader(torch.zeros(2, 1)), LogsLosses()
    job = tmp_path / "a" / "b" / "0"
    job.mkdir(parents=True)

    def trainer() -> Any:
        return make_trainer(L, callbacks=[JobObserver(job)], max_epochs=1)

    def progress() -> Any:
        return read_json(JobFiles(job).progress)

    fitting = trainer()
    fitting.fit(module, data, data)
    assert progress()["metrics"] == {"train/loss": 1.0, "fit_1": 1.0, "val/loss": 2.0}
    (fitting if testing == "the same Trainer" else trainer()).test(module, data, verbose=False)
    assert progress()["metrics"] == {"train/loss": 1.0, "fit_1": 1.0, "val/loss": 2.0, "test/loss": 3.0}
    assert (progress()["loss"], progress()["step"], progress()["of_steps"]) == (2.0, 2, 2)
    trainer().fit(module, data)
    assert progress()["metrics"] == {"train/loss": 1.0, "fit_2": 1.0}
