"""A task function is found by another process however its application was run, with what it wants imported first."""

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


OUTER = """import functools
def outer(function):
    @functools.wraps(function)
    def call(*arguments):
        return None if arguments else function()
    return call

@outer
@outer
@hydra.main"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments, "-m", "hydra/launcher=solo", "n=1"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("file", "arguments", "name"),
    [("run-it", ["run-it"], "run-it"), ("mine/train.py", ["-m", "mine.train"], "mine.train")],
    ids=["a script without .py", "python -m"],
)
def test_it_is_found_however_it_was_run(tmp_path: Path, file: str, arguments: list[str], name: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(TRAIN.replace("return cfg.n * 1.5", "return __name__"))
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert [row.returned for row in read(sweep_folder(tmp_path) / "results.jsonl")] == [name]


def test_decorators_above_hydras_are_no_part_of_the_task(tmp_path: Path) -> None:
    """These give None to whoever calls them with a configuration."""
    sweep(tmp_path, "n=1", script=TRAIN.replace("@hydra.main", OUTER))
    assert [row.returned for row in read(sweep_folder(tmp_path) / "results.jsonl")] == [1.5]


def test_an_interactive_session_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", TRAIN)
    assert done.returncode == 1
    assert "train lives in an interactive session" in done.stderr
    assert "Traceback" not in done.stderr


def test_modules_are_imported_first_where_asked(tmp_path: Path) -> None:
    """Those that the application names as PRELOAD, or those of `hydra.launcher.preload`."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").touch()
    found = "return [name for name in ('first', 'second') if name in sys.modules]"
    script = TRAIN.replace("return cfg.n * 1.5", found).replace("class Model:", "PRELOAD = ('first',)\n\nclass Model:")
    returned = []
    for preload in ("[]", "[second]"):
        sweep(tmp_path, "n=1", f"hydra.launcher.preload={preload}", "hydra.launcher.rerun=all", script=script)
        (row,) = read(sweep_folder(tmp_path) / "results.jsonl")
        returned.append(row.returned)
    assert returned == [["first"], ["second"]]
