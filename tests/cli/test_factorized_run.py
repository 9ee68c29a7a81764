"""`lightning-solo export RUN --format factorized` writes a run's factors, and measures both modules."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.cli.export import run
from lightning_solo.cli.factorized_run import write_factorized
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.nn.factorized_layers import Factorized, load
from tests.cli.test_quantized_run import TINY, finished
from tests.messages import mentions

Make = Callable[..., Any]
FACTORS = (*TINY, "+solo/callback=low_rank", "solo.callback.low_rank.rank=3")


def test_a_run_is_exported_with_the_factors_that_it_was_trained_with(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = finished(tmp_path / "run", make_trainer, FACTORS)
    capsys.readouterr()
    assert run([str(tmp_path / "run"), "--format", "factorized"]) == 0
    printed, folder = "".join(capsys.readouterr()), tmp_path / "run" / "checkpoints" / "last-factorized"
    for text in ("4 layers of rank 3", "validation/loss: ", "seconds of", "trained with these"):
        assert text in printed
    assert "GPU available" not in printed  # of the Trainers that validate
    (loss,) = [line.split() for line in printed.splitlines() if line.startswith("validation/loss")]
    assert loss[1] == loss[3]  # before and after: products compute as factors do
    loaded, ids = load(type(module)(**module.hparams), folder), torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids), module.eval()(ids))
    with pytest.raises(CheckpointError, match="--force"):
        write_factorized(tmp_path / "run")
    with pytest.raises(ConflictError, match=mentions("--rank", "already")):
        write_factorized(tmp_path / "run", tmp_path / "other", rank=2)
    alone = shutil.copyfile(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "alone.ckpt")
    assert "not measured" in write_factorized(alone)[-1]


@pytest.mark.long
def test_a_run_is_factorized_after_training(make_trainer: Make, tmp_path: Path) -> None:
    module = finished(tmp_path / "run", make_trainer, TINY)
    with pytest.raises(NothingToDoError, match=mentions("+callback=low_rank", "--rank 64")):
        write_factorized(tmp_path / "run")
    lines = write_factorized(tmp_path / "run", tmp_path / "out", rank=3, layers=["mlp"])
    assert "2 layers of rank 3" in lines[0]
    assert any("after training" in line for line in lines)
    loaded = load(type(module)(**module.hparams), tmp_path / "out")
    assert [name for name, part in loaded.named_modules() if isinstance(part, Factorized)] == [
        "blocks.0.mlp.up", "blocks.0.mlp.down"
    ]  # fmt: skip
    assert run([str(tmp_path / "run"), "--format", "factorized", "--rank", "0.5"]) == 0


@pytest.mark.parametrize("rank", ["0", "1.5", "-3", "half", "1.0"])
def test_ranks_without_meaning_are_refused(rank: str) -> None:
    with pytest.raises(PresetError, match=mentions(f"--rank {rank}")):
        run(["nowhere", "--format", "factorized", f"--rank={rank}"])
    with pytest.raises(PresetError, match=mentions("--rank", "factorized")):
        run(["nowhere", "--format", "weights", "--rank", "3"])
