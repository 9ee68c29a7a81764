"""Trials that are ended early: by which rule, that they end as after their last step, and that they are told apart."""

from __future__ import annotations

import signal
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.messages import lines_with

pytest.importorskip("optuna")
from optuna.trial import TrialState

from tests.sweeps import test_optuna
from tests.sweeps.applications import rows_of, run

EPOCHS = 4
TRAIN = """
import hydra, torch
import {home} as L
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

@dataclass
class Config:
    level: float = 0.0
    metric: str = "val_loss"
    die_at: int = -1

class Level(L.LightningModule):
    def __init__(self, level, metric, die_at):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.level, self.metric, self.die_at = level, metric, die_at
    def training_step(self, batch, _):
        self.log("train_loss", 100 - self.level)
        return self.layer(batch).mean()
    def validation_step(self, batch, _):
        self.log(self.metric, self.level)
    def on_validation_start(self):
        import os
        if self.current_epoch == self.die_at and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

@hydra.main(config_path=None, config_name="config", version_base="1.3")
def train(cfg):
    folder = HydraConfig.get().runtime.output_dir
    data = torch.utils.data.DataLoader(torch.ones(3, 1))
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(folder, save_last=True) if hasattr(L, "pytorch") else (
        L.callbacks.ModelCheckpoint(folder, save_last=True))
    trainer = L.Trainer(accelerator="cpu", max_epochs={epochs}, logger=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[checkpoint])
    model = Level(cfg.level, cfg.metric, cfg.die_at)
    trainer.fit(model, data, data)
    trainer.validate(model, data, verbose=False)
    with open("ended.txt", "a") as file:
        file.write(f"{{HydraConfig.get().job.num}} {{trainer.global_step}}\\n")
    return cfg.level

ConfigStore.instance().store(name="config", node=Config)
if __name__ == "__main__":
    train()
"""
SEARCH = ("level=interval(0,9)", "hydra.sweeper.sampler=random", "hydra.sweeper.pruning=true")


def search(folder: Path, *overrides: str, code: int = 0, home: str = "lightning") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN.format(home=home, epochs=EPOCHS))
    return run(folder, test_optuna.command(*SEARCH, *overrides), code=code)


def by_the_rule(levels: list[float], after: int) -> list[TrialState]:
    """Return what becomes of trials whose metric doesn't change: one above the median of the finished ones is ended."""
    finished: list[float] = []
    states = []
    for level in levels:
        ends = len(finished) >= after and level > statistics.median(finished)
        states.append(TrialState.PRUNED if ends else TrialState.COMPLETE)
        finished += [] if ends else [level]
    return states


@pytest.mark.long
@pytest.mark.parametrize("home", ["lightning", "pytorch_lightning"])
def test_trial_above_the_median_is_pruned_after_its_first_epoch(tmp_path: Path, home: str) -> None:
    done = search(
        tmp_path, "hydra.sweeper.n_trials=5", "hydra.sweeper.prune_after_trials=2", "hydra.sweeper.seed=3", home=home
    )
    trials, rows = test_optuna.trials(tmp_path), rows_of(tmp_path)
    expected = by_the_rule([trial.params["level"] for trial in trials], after=2)
    assert [trial.state for trial in trials] == expected
    assert 0 < expected.count(TrialState.PRUNED) < 5
    epochs = [1 if state == TrialState.PRUNED else EPOCHS for state in expected]
    assert [len(trial.intermediate_values) for trial in trials] == epochs
    steps = [3 * count for count in epochs]  # three batches in an epoch
    assert [row.steps for row in rows] == steps
    assert (tmp_path / "ended.txt").read_text().split("\n")[:-1] == [f"{n} {step}" for n, step in enumerate(steps)]
    assert [row.detail for row in rows] == ["pruned at 1" if count == 1 else "" for count in epochs]
    assert {row.status for row in rows} == {"finished"}
    for row in rows:
        assert (tmp_path / row.folder / "last.ckpt").exists()
    assert f"5 trials: {expected.count(TrialState.COMPLETE)} complete, {expected.count(TrialState.PRUNED)} pruned" in (
        done.stdout
    )


@pytest.mark.long
def test_search_without_pruning_prunes_no_trial(tmp_path: Path) -> None:
    search(tmp_path, "hydra.sweeper.pruning=false", "hydra.sweeper.n_trials=3", "hydra.sweeper.prune_after_trials=0")
    trials = test_optuna.trials(tmp_path)
    assert [(trial.state, len(trial.intermediate_values)) for trial in trials] == [(TrialState.COMPLETE, 0)] * 3
    assert [row.steps for row in rows_of(tmp_path)] == [3 * EPOCHS] * 3


@pytest.mark.long
def test_no_trial_is_pruned_before_prune_after_steps(tmp_path: Path) -> None:
    ranges = ("hydra.sweeper.prune_after_trials=1", "hydra.sweeper.prune_after_steps=3", "hydra.sweeper.n_trials=3")
    search(tmp_path, *ranges)
    trials = test_optuna.trials(tmp_path)
    expected = by_the_rule([trial.params["level"] for trial in trials], after=1)
    assert [trial.state for trial in trials] == expected
    assert {len(t.intermediate_values) for t in trials if t.state == TrialState.PRUNED} == {3}


@pytest.mark.long
def test_maximized_metric_is_pruned_below_the_median(tmp_path: Path) -> None:
    more = ("hydra.sweeper.direction=maximize", "hydra.sweeper.monitor=val_accuracy", "metric=val_accuracy")
    search(tmp_path, *more, "hydra.sweeper.n_trials=3", "hydra.sweeper.prune_after_trials=1")
    trials = test_optuna.trials(tmp_path)
    assert [trial.state for trial in trials] == by_the_rule([-trial.params["level"] for trial in trials], after=1)
    assert TrialState.PRUNED in {trial.state for trial in trials}


@pytest.mark.long
def test_pruning_without_a_reported_metric_is_named(tmp_path: Path) -> None:
    done = search(tmp_path, "metric=val_accuracy", "hydra.sweeper.n_trials=1")
    assert lines_with(done.stdout, "validation loss", "val_accuracy")
    assert "hydra.sweeper.monitor=" in done.stdout


@pytest.mark.long
def test_resumed_trial_reports_each_step_once(tmp_path: Path) -> None:
    """Killed in its third epoch, it is tried again and reports only what is new."""
    search(tmp_path, "die_at=2", "hydra.launcher.retries=1", "hydra.sweeper.n_trials=2")
    trials, rows = test_optuna.trials(tmp_path), rows_of(tmp_path)
    assert [row.attempt for row in rows] == [2, 1]
    assert [list(trial.intermediate_values) for trial in trials] == [[1, 2, 3, 4]] * 2
    assert "already reported" not in (tmp_path / rows[0].folder / "output.log").read_text()


@pytest.mark.long
def test_pruned_trial_of_a_killed_command_stays_pruned(tmp_path: Path) -> None:
    script = TRAIN.format(home="lightning", epochs=EPOCHS)
    (tmp_path / "train.py").write_text(test_optuna.with_kill(script, "Study", "tell", 4))
    overrides = (*SEARCH, "hydra.sweeper.n_trials=4", "hydra.sweeper.prune_after_trials=1", "hydra.sweeper.seed=1")
    for code in (-signal.SIGKILL, 0):
        run(tmp_path, test_optuna.command(*overrides), code=code)
    trials = test_optuna.trials(tmp_path)
    expected = by_the_rule([trial.params["level"] for trial in trials], after=1)
    assert expected[3] == TrialState.PRUNED  # the one that was told after the kill
    assert [trial.state for trial in trials] == expected
    assert [row.attempt for row in rows_of(tmp_path)] == [1] * 4
