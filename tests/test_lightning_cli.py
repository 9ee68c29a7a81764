"""LightningCLI takes presets by name, on the command line and in YAML, and refuses contradictions."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule

import lightning_solo as solo
from tests.messages import lines_with, nearest
from tests.modules import loader

pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)  # Lightning's own

QUIET = [
    *("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false"),
    *("--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"),
    *("--trainer.enable_model_summary=false", "--seed_everything=0"),
]


class Small(LightningModule):
    """A linear regression with its own data."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def train_dataloader(self) -> Any:
        return loader(2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the program with a command line, and returns its Trainer."""

    def program(*line: str) -> Any:
        quiet = [*QUIET, f"--trainer.default_root_dir={tmp_path}"]
        monkeypatch.setattr("sys.argv", ["main.py", "fit", *([] if "--config" in line else quiet), *line])
        return solo.SoloCLI(Small).trainer

    return program


def names(trainer: Any) -> list[str]:
    return [type(callback).__name__ for callback in trainer.callbacks]


@pytest.mark.parametrize(
    ("line", "precision", "techniques"),
    [
        (["--solo=compact"], "bf16-true", ["CompactStates", "GradientRelease"]),
        (["--solo=[bf16,gradient_release]"], "bf16-mixed", ["GradientRelease"]),
        (["--solo=compact", "--solo_overrides=[~callback.gradient_release]"], "bf16-true", ["CompactStates"]),
        (["--solo=compact", "--solo_overrides", "~callback.gradient_release"], "bf16-true", ["CompactStates"]),
        (["--solo=auto", "--solo_overrides+=auto.presets=[bf16]"], "bf16-mixed", []),
    ],
)
def test_presets_by_name(run: Any, line: list[str], precision: str, techniques: list[str]) -> None:
    trainer = run(*line)
    assert trainer.precision == precision
    assert set(techniques) <= set(names(trainer))
    assert trainer.global_step == 2


def test_preset_in_a_file_is_printed_and_read_again(run: Any, tmp_path: Path) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        run("--solo=compact", "--solo_overrides=[callback.compact_states.moment_bits=32]", "--print_config")
    file = tmp_path / "fit.yaml"
    file.write_text(text.getvalue())
    trainer = run("--config", str(file))
    (states,) = [callback for callback in trainer.callbacks if isinstance(callback, solo.CompactStates)]
    assert states.moment_bits == 32


def test_without_a_preset_it_is_lightnings(run: Any) -> None:
    trainer = run("--trainer.callbacks+=lightning_solo.GradientRelease")
    assert "PresetGuard" not in names(trainer)
    assert "GradientRelease" in names(trainer)


def test_callbacks_of_both_act(run: Any) -> None:
    trainer = run("--solo=compact", "--trainer.callbacks+=lightning_solo.MemoryLogger")
    assert {"CompactStates", "MemoryLogger", "SaveConfigCallback"} <= set(names(trainer))


@pytest.mark.long
def test_auto_plans_with_the_batch_of_a_data_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(Small):
        train_dataloader = LightningModule.train_dataloader

    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.data = loader(2)

        def train_dataloader(self) -> Any:
            return self.data

    options = [*QUIET, f"--trainer.default_root_dir={tmp_path}", "--solo=auto", "--solo_overrides+=auto.presets=[bf16]"]
    monkeypatch.setattr("sys.argv", ["main.py", "fit", *options])
    trainer = solo.SoloCLI(Without, Data).trainer
    assert (trainer.precision, trainer.global_step) == ("bf16-mixed", 2)


REFUSED = [
    (
        ["--solo=bf16", "--trainer.precision=32-true"],
        ("trainer.precision='32-true'", "write --solo_overrides=['precision=32-true']"),
    ),
    (
        ["--solo=compact", "--solo_overrides+=precision=16-mixed"],
        ("write", "--solo_overrides+=precision=bf16-"),
    ),
    (["--solo=bf16", "--solo_overrides+=+callback=micro_bathcing"], (nearest("micro_batching"),)),
    (["--solo=compact", "--trainer.precision=16-mixed"], ("trainer.precision='16-mixed'", "drop precision")),
    (["--solo=compact", "--trainer.devices=2"], ("trainer.devices", "devices=1")),
    (["--solo=compcat"], (nearest("compact"),)),
    (["--trainer.strategy=compact"], ("trainer.strategy='compact'", "the preset compact")),
    (["--solo_overrides+=precision=bf16-mixed"], ("solo_overrides=['precision=bf16-mixed']", "--solo")),
    (["--solo_allow=my_project"], ("solo_allow='my_project'", "--solo")),
]


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_mistakes_are_refused_as_by_the_parser(
    run: Any, capsys: pytest.CaptureFixture[str], line: list[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(*line)
    assert left.value.code == 2
    assert lines_with(capsys.readouterr().err, "error: ", *words)
