"""A sweep and a search under the Hydra that is installed, 1.3 or 1.4: neither has anything to warn about."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
import pytest

from tests.conftest import long
from tests.sweeps.applications import rows_of, run, sweep_folder

TRAIN = """
import inspect
from dataclasses import dataclass, field
import hydra
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from lightning_solo.presets.compose import VERSION_BASE

# what Hydra 1.4 asks of an application that instantiates
allowed = {"execution_whitelist": ["builtins.complex"]}
allowed = allowed if "execution_whitelist" in inspect.signature(hydra.main).parameters else {}

@dataclass
class Config:
    x: int = 0
    number: dict = field(default_factory=lambda: {"_target_": "builtins.complex", "imag": "${x}"})

@hydra.main(config_path=None, config_name="config", **VERSION_BASE, **allowed)
def train(cfg):
    print("Hydra", hydra.__version__)
    return instantiate(cfg.number).imag

ConfigStore.instance().store(name="config", node=Config)
if __name__ == "__main__":
    train()
"""
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


@pytest.mark.parametrize(
    "sweeper", [[], ["hydra/sweeper=solo_optuna", "hydra.sweeper.n_trials=2"]], ids=["sweep", "search"]
)
@pytest.mark.parametrize("preload", ["[]", long("[in_a_thread]")], ids=["forked", "fresh"])
def test_sweep_and_search_run_without_warnings(tmp_path: Path, sweeper: list[str], preload: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "in_a_thread.py").write_text(THREAD)
    overrides = ["hydra/launcher=solo", f"hydra.launcher.preload={preload}", "hydra.job_logging.root.level=WARNING"]
    done = run(tmp_path, [sys.executable, "train.py", "-m", *overrides, *sweeper, "x=1,2"])
    rows = rows_of(tmp_path)
    assert [row.returned for row in rows] == [float(row.overrides[0].removeprefix("x=")) for row in rows]
    outputs = [(sweep_folder(tmp_path) / str(row.number) / "output.log").read_text() for row in rows]
    assert [output.splitlines()[-1] for output in outputs] == [f"Hydra {hydra.__version__}"] * 2
    assert "Warning" not in done.stdout + done.stderr + "".join(outputs)
    assert "#1 " in done.stdout  # Hydra's own log, as it was configured
