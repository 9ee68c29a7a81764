"""A task function is found by another process however its application was run, with what it wants imported first."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from lightning_solo.sweeps.application import application_of
from tests.conftest import long
from tests.sweeps.applications import THREAD, TRAIN, returned, rows_of, run, sweep, training

PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("twice", lambda number: 2 * number)

class Twice(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        pass
"""


def test_job_has_the_resolvers_of_a_hydra_plugin(tmp_path: Path) -> None:
    """Though neither the script nor anything that it imports registers it."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "twice.py").write_text(PLUGIN)
    script = training("return cfg.doubled").replace("n: int = 0", 'n: int = 0\n    doubled: int = "${twice:${n}}"')
    sweep(tmp_path, "n=1,2", script=script)
    assert returned(tmp_path) == [2, 4]


OUTER = """import functools
def outer(function):
    @functools.wraps(function)
    def call(*arguments):
        return None if arguments else function()
    return call

@outer
@outer
@hydra.main"""


AS_A_SWEEP = ["-m", "hydra/launcher=solo", "n=1"]


@pytest.mark.parametrize(
    ("file", "arguments", "name"),
    [("run-it", ["run-it"], "run-it"), ("mine/train.py", ["-m", "mine.train"], "mine.train")],
    ids=["a script without .py", "python -m"],
)
def test_script_without_py_and_module_run_by_name_are_imported(
    tmp_path: Path, file: str, arguments: list[str], name: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(training("return __name__"))
    run(tmp_path, [sys.executable, *arguments, *AS_A_SWEEP])
    assert returned(tmp_path) == [name]


# --- those that can't be imported ---

CALL = "    train()\n"
GUARD = 'if __name__ == "__main__":\n'
MAIN = "hydra.main(config_path=None, config_name='config', version_base='1.3')"
CLOSURE = f"""    def outer():
        offset = 10
        def inner(cfg):
            return cfg.n * 1.5 + offset
        return inner
    {MAIN}(outer())()
"""
METHOD = f"""    class Task:
        offset = 10
        def run(self, cfg):
            return cfg.n * 1.5 + self.offset
    {MAIN}(Task().run)()
"""
RESOLVER = """    from omegaconf import OmegaConf
    offset = 10
    OmegaConf.register_new_resolver("mine", lambda number: 1.5 * number + offset)
    train()
"""
OWN_CLASS = "import pickle; assert type(pickle.loads(pickle.dumps(Model()))) is Model\n    return cfg.n * 1.5 + 10"
MADE = """node=__import__('dataclasses').make_dataclass(
    'Made', [('n', int, 0), ('kind', str, ''), ('sleep', float, 0.0)])"""
SCRIPTS = {
    "decorators above Hydra's": training("return cfg.n * 1.5 + 10").replace("@hydra.main", OUTER),  # not called in jobs
    "a lambda": TRAIN.replace(CALL, f"    {MAIN}(lambda cfg: cfg.n * 1.5 + 10)()\n"),
    "a closure": TRAIN.replace(CALL, CLOSURE),
    "a method": TRAIN.replace(CALL, METHOD),
    "no guard": training(OWN_CLASS).replace(GUARD + CALL, "train()\n"),
    "a resolver below the guard": training("return cfg.y")
    .replace(CALL, RESOLVER)
    .replace("n: int = 0", 'n: int = 0\n    y: float = "${mine:${n}}"'),
    "a class of no module": training("return cfg.n * 1.5 + 10").replace("node=Config", MADE),
}


@pytest.mark.parametrize(
    "script",
    [
        script if name in ("decorators above Hydra's", "no guard") else long(script)  # functions and classes, by value
        for name, script in SCRIPTS.items()
    ],
    ids=SCRIPTS,
)
def test_any_task_function_runs(tmp_path: Path, script: str) -> None:
    sweep(tmp_path, "n=1,2", script=script)
    assert returned(tmp_path) == [11.5, 13.0]


def test_closure_runs_in_fresh_interpreters_and_is_not_run_twice(tmp_path: Path) -> None:
    for told in ("fresh interpreter", "by an earlier command"):
        script = SCRIPTS["a closure"].replace("class Model:", "PRELOAD = ('in_a_thread',)\n\nclass Model:")
        (tmp_path / "in_a_thread.py").write_text(f"import time\n{THREAD}\n")
        assert told in sweep(tmp_path, "n=1", script=script).stdout
    rows = rows_of(tmp_path)
    assert [(row.returned, row.attempt) for row in rows] == [(11.5, 1)]


USES_ITS_CLASS = training(OWN_CLASS)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [(None, ["-c", USES_ITS_CLASS]), long(USES_ITS_CLASS, ["-"])],
    ids=["python -c", "standard input"],
)
def test_application_without_a_file_runs(tmp_path: Path, given: str | None, arguments: list[str]) -> None:
    run(tmp_path, [sys.executable, *arguments, *AS_A_SWEEP], given=given)
    assert returned(tmp_path) == [11.5]


def test_task_that_cannot_be_pickled_is_refused_before_a_job_runs(tmp_path: Path) -> None:
    script = training("return LOCK.locked()", "import threading\nLOCK = threading.Lock()")
    done = sweep(tmp_path, "n=1", script=script.replace(GUARD + CALL, "train()\n"), code=1)
    assert "another process" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "multirun").glob("*"))


# --- imports ---


@pytest.mark.long
def test_preloaded_modules_are_imported_before_the_first_job(tmp_path: Path) -> None:
    """Those that the application names as PRELOAD, or those of `hydra.launcher.preload`."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").touch()
    found = "return [name for name in ('first', 'second') if name in sys.modules]"
    script = training(found, "PRELOAD = ('first',)")
    values = []
    for preload in ("[]", "[second]"):
        sweep(tmp_path, "n=1", f"hydra.launcher.preload={preload}", "hydra.launcher.rerun=all", script=script)
        values += returned(tmp_path)
    assert values == [["first"], ["second"]]


def test_preload_of_the_command_replaces_that_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PRELOAD", ("first",), raising=False)
    assert application_of(lambda: None).preload == ("first",)
    assert application_of(lambda: None, ("second",)).preload == ("second",)


def test_lazy_module_is_not_imported_by_the_hash_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazily.py").write_text("raise RuntimeError\n")
    spec = importlib.util.spec_from_file_location("lazily", tmp_path / "lazily.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazily", module)
    spec.loader.exec_module(module)
    assert application_of(lambda: None).code
