"""The ready search spaces: every key and value of them is one that the application takes, and a search comes to one."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("optuna")
import optuna

from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import check_command_line
from lightning_solo.sweeps.results import read
from lightning_solo.sweeps.search_settings import settings
from lightning_solo.sweeps.search_space import search_space
from tests.cli.commands import call

MODULE = ["model._target_=my_project.MyModule", "allow=[my_project]"]


@pytest.mark.parametrize(
    ("arguments", "searched"), [(["experiment=search_byte_gpt"], 6), (["experiment=search_fine_tuning", *MODULE], 4)]
)
def test_values_of_the_ready_spaces_are_accepted(arguments: list[str], searched: int) -> None:
    check_command_line(["-m", *arguments])
    sweeper = OmegaConf.to_container(compose_application(arguments).hydra.sweeper)
    assert isinstance(sweeper, dict)
    del sweeper["_target_"]
    space = search_space([f"{key}={value}" for key, value in sweeper.pop("params").items()])
    assert len(space.distributions) == searched
    assert settings({str(key): value for key, value in sweeper.items()}, 1).pruning
    for sample in space.samples():
        check_command_line([*arguments, *sample])


MINE = """
import torch, lightning as L
from torch.utils.data import DataLoader, TensorDataset

class MyModule(L.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.net, self.optimizer = torch.nn.Linear(4, 1), optimizer
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log_dict({"val_loss": loss, "val_accuracy": -2 * loss})
    def configure_optimizers(self):
        return self.optimizer(self.parameters())
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
    val_dataloader = train_dataloader
"""


ACCURACY = ["hydra.sweeper.monitor=val_accuracy", "hydra.sweeper.direction=maximize"]


@pytest.mark.long
@pytest.mark.parametrize(("more", "metric"), [([], "val_loss"), (ACCURACY, "val_accuracy")])
def test_module_of_the_user_is_searched_by_its_metric(tmp_path: Path, more: list[str], metric: str) -> None:
    (tmp_path / "my_project.py").write_text(MINE)
    few = ["hydra.sweeper.n_trials=1", "trainer.max_steps=4", "trainer.val_check_interval=4"]
    call(tmp_path, "train", "experiment=search_fine_tuning", *MODULE, "run=search", *few, *more)
    (row,) = read(tmp_path / "runs" / "search" / "results.jsonl")
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path / 'runs' / 'search' / 'optuna.db'}")
    assert [trial.value for trial in study.trials] == [row.metrics[metric]]
