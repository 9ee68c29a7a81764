"""The presets in other people's applications: Hydra's, the template's, and LightningCLI's; run outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.utils import instantiate

import lightning_solo as solo
from lightning_solo.cards.catalogue import built_in_cards, load_class
from tests.conftest import long
from tests.messages import nearest

ROOT = Path(__file__).parents[1]

TEMPLATE_APP = """
import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig
from train_module import module, data


def instantiate_callbacks(callbacks_cfg):  # as lightning-hydra-template does, without _convert_
    return [instantiate(node) for node in callbacks_cfg.values() if "_target_" in node]


@hydra.main(config_path="conf", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> None:
    callbacks = instantiate_callbacks(cfg.callbacks)
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=False)  # the template's line
    trainer.fit(module(), data())
    print("steps", trainer.global_step, [type(c).__name__ for c in callbacks])


main()
"""
TEMPLATE_CONF = """
trainer:
  _target_: lightning.pytorch.trainer.Trainer
  max_epochs: 2
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
callbacks:
  schedule:
    _target_: lightning_solo.callbacks.AccumulationSchedule
    milestones: [[0, 1], [1, 2]]
  checkpointing:
    _target_: lightning_solo.ActivationCheckpointing
    blocks: [Block]
  memory:
    _target_: lightning_solo.MemoryLogger
    every_n_steps: 2
  speed:
    _target_: lightning_solo.Throughput
"""
CLI_APP = """
from lightning.pytorch.cli import LightningCLI
import lightning as L
from train_module import Module, Data

cli = LightningCLI(Module, Data)
print("steps", cli.trainer.global_step, [type(c).__name__ for c in cli.trainer.callbacks])
"""
CLI_CONF = """
fit:
  trainer:
    accelerator: cpu
    max_epochs: 2
    logger: false
    enable_checkpointing: false
    enable_progress_bar: false
    callbacks:
      - class_path: lightning_solo.AccumulationSchedule
        init_args:
          milestones: [[0, 1], [1, 2]]
      - class_path: lightning_solo.ActivationCheckpointing
        init_args:
          blocks: [Block]
      - class_path: lightning_solo.MemoryLogger
        init_args: {every_n_steps: 2}
      - class_path: lightning_solo.Throughput
"""
MODULE = """
import lightning as L
import lightning.pytorch
from tests.modules import loader, regression, Stack


def module():
    return regression(lightning.pytorch)


def data():
    return loader(8)


class Module(type(module())):
    pass


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader(8)
"""


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / "hydra_app", tmp_path / "app"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["lightning-solo: preset checkpointing:", "backward recomputes 4 Sequential", "precision bf16-mixed"]),
        long(["solo=every_second"], ["backward recomputes 2 Sequential"]),
        long(["solo=baseline", "+solo/callback=activation_checkpointing"], ["recomputes 4", "precision 32-true"]),
        long(["~solo.callback.activation_checkpointing"], ["precision bf16-mixed"]),
    ],
)
def test_the_example_application_outside_the_checkout(app: Path, overrides: list[str], words: list[str]) -> None:
    output = run(app, "train.py", *overrides)
    for word in words:
        assert word in output
    assert ("recomputes" in output) == any("recomputes" in word for word in words)


def test_the_applications_errors_are_ours(app: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "train.py", "+solo.callback.memory_logger.tabel=1"]
    done = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode != 0
    assert nearest("table") in done.stderr
    assert "solo.callback.memory_logger.tabel=1" in done.stderr  # as the command line has it


@pytest.mark.long
def test_only_the_group_solo_appears_in_an_application(app: Path) -> None:
    listing = run(app, "train.py", "--help").split("== Config ==")[0]
    groups = [line.split(":")[0] for line in listing.splitlines() if ":" in line]
    assert {group for group in groups if not group.startswith("hydra")} <= {
        "model",
        "solo",
        "solo/callback",
        "solo/device",
        "solo/strategy",
        "solo/schema",
    }
    assert "byte_gpt" not in listing
    assert "checkpointing" in listing


def test_discovery_imports_no_torch(app: Path) -> None:
    (app / "bare.py").write_text(
        "import sys, hydra\n"
        "@hydra.main(config_path='conf', config_name='train', version_base='1.3')\n"
        "def main(cfg): print(cfg.solo.precision, 'torch' in sys.modules)\n"
        "main()\n"
    )
    assert "bf16-mixed False" in run(app, "bare.py")


@pytest.mark.long
def test_template_targets(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(TEMPLATE_CONF)
    (tmp_path / "train_module.py").write_text(MODULE)
    (tmp_path / "app.py").write_text(TEMPLATE_APP)
    output = run(tmp_path, "app.py")
    # epoch 0: 8 batches, 8 steps; epoch 1: 8 batches in windows of 2, 4 steps
    assert "steps 12 ['AccumulationSchedule', 'ActivationCheckpointing', 'MemoryLogger', 'Throughput']" in output
    assert "backward recomputes 3 Block" in output


def test_lightning_cli(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(CLI_CONF)
    (tmp_path / "train_module.py").write_text(MODULE)
    (tmp_path / "app.py").write_text(CLI_APP)
    output = run(tmp_path, "app.py", "--config", "settings.yaml", "fit")
    assert "steps 12" in output
    assert "backward recomputes 3 Block" in output


@pytest.mark.parametrize("name", [name for name, card in built_in_cards().items() if card.group == "callback"])
def test_technique_passes_through_instantiate_as_an_object(name: str) -> None:
    """OmegaConf turns objects of dataclasses into configurations."""
    card = built_in_cards()[name]
    technique = load_class(card)(**(card.on_cpu or {}))
    trainer = instantiate({"_target_": "lightning.pytorch.Trainer", "logger": False}, callbacks=[technique])
    assert any(callback is technique for callback in trainer.callbacks)
    assert load_class(card).settings_class() is card.settings


def test_arguments_of_a_preset_pass_through_instantiate() -> None:
    kwargs = solo.trainer_kwargs("compact")
    trainer = instantiate({"_target_": "lightning.pytorch.Trainer", "logger": False}, **kwargs)
    assert [*trainer.callbacks][: len(kwargs["callbacks"])] == kwargs["callbacks"]
