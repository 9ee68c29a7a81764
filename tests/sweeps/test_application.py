"""How another process finds an application: by its script, whatever that is called, with the resolvers it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_solo.sweeps.results import read
from tests.sweeps.applications import TRAIN, environment, sweep, sweep_folder

pytestmark = pytest.mark.timeout(300)
PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("twice", lambda number: 2 * number)

class Twice(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        pass
"""


def test_a_resolver_of_a_plugin_of_hydras_is_there_in_a_job(tmp_path: Path) -> None:
    """Though neither the script nor anything that it imports registers it."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "twice.py").write_text(PLUGIN)
    script = TRAIN.replace("n: int = 0", 'n: int = 0\n    doubled: int = "${twice:${n}}"')
    sweep(tmp_path, "n=1,2", script=script.replace("return cfg.n * 1.5", "return cfg.doubled"))
    assert [row.returned for row in read(sweep_folder(tmp_path) / "results.jsonl")] == [2, 4]


@pytest.mark.parametrize("name", ["train", "train.script"])
def test_a_script_without_the_suffix_of_python(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TRAIN.replace("return cfg.n * 1.5", "return [cfg.n, Model.__module__]"))
    command = [sys.executable, name, "-m", "hydra/launcher=solo", "n=1,2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row.returned for row in read(sweep_folder(tmp_path) / "results.jsonl")] == [[1, "train"], [2, "train"]]
