"""The same sweep through submitit, as on a cluster, with its executor for one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_solo.cli.command_line import check_command_line
from tests.cli.test_train import QUICK, steps_of, train

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install hydra-submitit-launcher")


@pytest.mark.parametrize("launcher", ["submitit_local", "submitit_slurm"])
def test_folders_of_its_launchers_are_allowed(launcher: str) -> None:
    check_command_line(["-m", f"hydra/launcher={launcher}", "seed=1,2"])


@pytest.mark.long
def test_sweep_of_the_command_line_through_submitit(tmp_path: Path) -> None:
    train(tmp_path, *QUICK, "-m", "hydra/launcher=submitit_local", "run=cluster", "solo=bf16", "trainer.max_steps=2")
    assert steps_of(tmp_path / "runs" / "cluster" / "0") == 2
    assert list((tmp_path / "runs" / "cluster" / ".submitit").rglob("*_result.pkl"))
