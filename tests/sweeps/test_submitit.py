"""The same sweep through submitit, as on a cluster, with its executor for one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_train import QUICK, steps_of, train

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install hydra-submitit-launcher")


@pytest.mark.long
def test_sweep_of_the_command_line_through_submitit(tmp_path: Path) -> None:
    train(tmp_path, *QUICK, "-m", "hydra/launcher=submitit_local", "run=cluster", "solo=bf16", "trainer.max_steps=2")
    assert steps_of(tmp_path / "runs" / "cluster" / "0") == 2
    assert list((tmp_path / "runs" / "cluster" / ".submitit").rglob("*_result.pkl"))
