"""`hydra/sweeper=solo_optuna` in a Hydra application of somebody else's: trials, objectives, and what a kill leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.messages import lines_with, nearest

pytest.importorskip("optuna")
import optuna
from optuna.trial import FrozenTrial, TrialState

from lightning_solo.sweeps.pruning import storage
from tests.conftest import long
from tests.sweeps.applications import command as sweep_command
from tests.sweeps.applications import popen, rows_of, run, sweep_folder

TRAIN = """
import hydra, os, sys, time
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

@dataclass
class Config:
    x: float = 0.0
    width: int = 1
    kind: str = "fine"
    sleep: float = 0.0

@hydra.main(config_path=None, config_name="config", version_base="1.3")
def train(cfg):
    with open("starts.txt", "a") as file:
        file.write(f"{HydraConfig.get().job.num} {cfg.x} {cfg.width}\\n")
    time.sleep(cfg.sleep)
    if cfg.kind == "raise":
        raise ValueError("bad luck")
    if cfg.kind == "killed":
        os.kill(os.getpid(), 9)
    if cfg.kind == "nan":
        return float("nan")
    if cfg.kind == "nothing":
        return None
    kept = b"x" * (cfg.width * 2**20)
    return (cfg.x - 1) ** 2

ConfigStore.instance().store(name="config", node=Config)
if __name__ == "__main__":
    train()
"""
SEARCH = ("hydra/sweeper=solo_optuna",)
SPACE = ("x=interval(0,3)", "width=choice(1,2,4)")


def command(*overrides: str) -> list[str]:
    return sweep_command(*SEARCH, *overrides)


@contextmanager
def begun(folder: Path, *overrides: str, script: str = TRAIN) -> Iterator[subprocess.Popen[str]]:
    """Start a search in a session of its own, and yield when its first trial has begun; leave no process behind."""
    restore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    process = popen(folder, *SEARCH, *overrides, script=script, start_new_session=True, preexec_fn=restore)
    with process:
        try:
            deadline = time.monotonic() + 500
            while not starts(folder):
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def search(folder: Path, *overrides: str, code: int = 0, script: str = TRAIN) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    return run(folder, command(*overrides), code=code)


def trials(folder: Path) -> list[FrozenTrial]:
    found = sweep_folder(folder)
    return optuna.load_study(study_name=found.name, storage=storage(found, new=False)).trials


def starts(folder: Path) -> list[tuple[int, str]]:
    """Return (job, the parameters it was started with), in order."""
    lines = (folder / "starts.txt").read_text().splitlines() if (folder / "starts.txt").exists() else []
    return [(int(number), params) for number, _, params in (line.partition(" ") for line in lines)]


# --- acted ---


@pytest.mark.long
def test_search_draws_the_same_parameters_as_optuna_alone(tmp_path: Path) -> None:
    done = search(tmp_path, *SPACE, "hydra.sweeper.n_trials=13")
    found = trials(tmp_path)
    assert [trial.params for trial in found] == drawn_by_optuna_alone(13)  # the first ten by chance, then by TPE
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 13
    assert [trial.value for trial in found] == [row.returned for row in rows_of(tmp_path)]
    assert starts(tmp_path) == [(t.number, f"{t.params['x']} {t.params['width']}") for t in found]
    best = min(found, key=lambda trial: trial.value)
    assert f"best: trial {best.number}, value {best.value:.6g}: x={best.params['x']}" in done.stdout
    summary = yaml.safe_load((sweep_folder(tmp_path) / "optimization_results.yaml").read_text())
    assert summary == {"name": "optuna", "best_params": best.params, "best_value": best.value}
    assert (sweep_folder(tmp_path) / "multirun.yaml").exists()


def drawn_by_optuna_alone(count: int) -> list[dict[str, Any]]:
    study = optuna.create_study()
    for number in range(count):
        seed = int(np.random.SeedSequence([0, number]).generate_state(1)[0])
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        trial = study.ask()
        x = trial.suggest_float("x", 0, 3)
        trial.suggest_categorical("width", ["1", "2", "4"])
        study.tell(trial, (x - 1) ** 2)
    return [trial.params for trial in study.trials]


@pytest.mark.long
def test_space_may_be_in_the_configuration(tmp_path: Path) -> None:
    search(tmp_path, "+hydra.sweeper.params.x='interval(2,3)'", "width=3", "hydra.sweeper.n_trials=3")
    assert [list(trial.params) for trial in trials(tmp_path)] == [["x"]] * 3
    assert all(2 <= trial.params["x"] <= 3 for trial in trials(tmp_path))
    assert {params.split()[1] for _, params in starts(tmp_path)} == {"3"}


@pytest.mark.long
def test_second_objective_is_peak_memory(tmp_path: Path) -> None:
    space = ("x=1,2", "width=range(1,121,40)")
    done = search(tmp_path, *space, "hydra.sweeper.direction=[minimize,minimize]", "hydra.sweeper.n_trials=8")
    found = trials(tmp_path)
    assert [trial.values for trial in found] == [
        [row.returned, float(row.peak_host_bytes or 0)] for row in rows_of(tmp_path)
    ]
    peaks = {t.params["width"]: t.values[1] for t in found}
    assert len(peaks) > 1
    most, least = max(peaks), min(peaks)
    assert peaks[most] - peaks[least] == pytest.approx((most - least) * 2**20, rel=0.1)  # what a job allocates
    assert done.stdout.count("best: trial") == len(summary_of(tmp_path)["solutions"])


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((sweep_folder(folder) / "optimization_results.yaml").read_text())
    return found


MEETS = """
    number, ended = HydraConfig.get().job.num, sorted(os.listdir("ended"))
    with open(f"begun/{number}", "w") as file:
        file.write(" ".join(ended))
    while number < 4 and not os.path.exists(f"begun/{number ^ 1}"):  # 0 and 1 are a pair, and 2 and 3
        time.sleep(0.02)
    open(f"ended/{number}", "w").close()
"""


RANK_0 = """
    if os.environ.get("RANK", "0") != "0":
        return
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "two",
    [["parallel=2"], ["gpus=auto", "parallel=2"], ["gpus=[0,3]"], ["gpus=auto", "+trainer.devices=2"]],
    ids=["processes", "processes on GPUs", "GPUs", "pairs of GPUs"],
)
def test_parallel_trials_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: list[str]) -> None:
    """Each of a pair ends only when the other has begun; each says which ones had ended before it began."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    (tmp_path / "begun").mkdir()
    (tmp_path / "ended").mkdir()
    script = TRAIN.replace("    time.sleep(cfg.sleep)\n", RANK_0 + MEETS)
    script = script.replace("    n: int = 0", "    n: int = 0\n    trainer: dict = field(default_factory=dict)")
    script = script.replace("import dataclass", "import dataclass, field")
    settings = [text if text[0] == "+" else f"hydra.launcher.{text}" for text in two]
    search(tmp_path, *settings, "hydra.sweeper.n_trials=5", *SPACE, script=script)
    before = [(tmp_path / "begun" / str(number)).read_text() for number in range(5)]
    assert before == ["", "", "0 1", "0 1", "0 1 2 3"]  # 2, 2 and 1 at a time
    assert len({trial.params["x"] for trial in trials(tmp_path)}) == 5


def test_failed_trials_are_named_once_at_the_end(tmp_path: Path) -> None:
    space = ("kind=choice(fine,raise,killed,nan)", "x=interval(0,3)", "hydra.sweeper.sampler=random")
    done = search(tmp_path, *space, "hydra.sweeper.n_trials=10", code=1)
    states = {trial.params["kind"]: trial.state for trial in trials(tmp_path)}
    assert states == {
        "fine": TrialState.COMPLETE,
        "raise": TrialState.FAIL,
        "killed": TrialState.FAIL,
        "nan": TrialState.FAIL,
    }
    assert len(trials(tmp_path)) == 10
    failed = [row for row in rows_of(tmp_path) if row.status != "finished"]
    assert done.stderr.count(" of 10 jobs") == 1
    assert f"{len(failed)} of 10 jobs" in done.stderr
    assert "ValueError: bad luck" in done.stderr
    assert "rerun=failed" not in done.stderr  # which this sweeper refuses


# --- the same command goes on ---


@pytest.mark.long
def test_same_command_adds_the_missing_trials(tmp_path: Path) -> None:
    for trials_so_far in (2, 2, 12):
        search(tmp_path / "bits", *SPACE, f"hydra.sweeper.n_trials={trials_so_far}")
    assert [trial.params for trial in trials(tmp_path / "bits")] == drawn_by_optuna_alone(12)
    assert [number for number, _ in starts(tmp_path / "bits")] == list(range(12))


KILLED = """
def killed_at(owner, name, count):
    import os
    calls, real = [], getattr(owner, name)
    def replaced(*args, **kwargs):
        calls.append(1)
        if len(calls) == count and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    setattr(owner, name, replaced)
"""
OWNERS = {
    "Study": "optuna.study",
    "Trial": "optuna.trial",
    "Launch": "lightning_solo.sweeps.launch",
}


def with_kill(script: str, owner: str, name: str, count: int) -> str:
    """Return an application whose command is killed once, at a call of a method; its jobs know nothing of it."""
    main = 'if __name__ == "__main__":\n'
    killed = f"    from {OWNERS[owner]} import {owner}\n    killed_at({owner}, {name!r}, {count})\n"
    return script.replace(main, KILLED + main + killed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [
        ("Study", "ask", 3),
        ("Trial", "suggest_float", 3),
        ("Trial", "suggest_categorical", 3),  # x is stored, width isn't
        ("Trial", "suggest_categorical", 12),  # the same where TPE draws
        ("Launch", "__call__", 3),  # stored, not started
        ("Study", "tell", 3),  # finished, not told
    ],
)
def test_search_killed_at_any_step_is_resumed(tmp_path: Path, owner: str, name: str, count: int) -> None:
    script = with_kill(TRAIN, owner, name, count)
    overrides = (*SPACE, f"hydra.sweeper.n_trials={count + 2}")
    search(tmp_path, *overrides, script=script, code=-signal.SIGKILL)
    assert len(trials(tmp_path)) == (count - 1 if name == "ask" else count)
    search(tmp_path, *overrides, script=script)
    found = trials(tmp_path)
    assert [trial.params for trial in found] == drawn_by_optuna_alone(count + 2)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * (count + 2)
    assert starts(tmp_path) == [(t.number, f"{t.params['x']} {t.params['width']}") for t in found]


@pytest.mark.long
def test_ctrl_c_interrupts_a_trial_which_the_same_command_runs_again(tmp_path: Path) -> None:
    script = TRAIN.replace("    time.sleep(cfg.sleep)\n", "    while not os.path.exists('go'): time.sleep(0.02)\n")
    overrides = (*SPACE, "hydra.sweeper.n_trials=2")
    with begun(tmp_path, *overrides, script=script) as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=500)
    assert process.returncode == 130, said
    assert "interrupted with 0 of 2 jobs done" in said
    (tmp_path / "go").touch()
    search(tmp_path, *overrides, script=script)
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.COMPLETE] * 2
    assert Counter(number for number, _ in starts(tmp_path)) == {0: 2, 1: 1}
    assert len(set(starts(tmp_path))) == 2  # with the same parameters


# --- refused ---


@pytest.mark.long
def test_another_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    search(tmp_path, "hydra.sweep.dir=multirun/mine", "x=interval(0,3)", "width=2", "hydra.sweeper.n_trials=1")
    other = ("x=interval(0,4)", "kind=choice(fine,nan)", "hydra.sweep.dir=multirun/mine", "hydra.sweeper.n_trials=2")
    done = search(tmp_path, *other, code=1)
    for words in (
        "x: 0.0 to 3.0 before, 0.0 to 4.0 now",
        "kind: not there before, choice(fine, nan) now",
        "width=2: given",
    ):
        assert words in done.stderr
    named = (*other, "hydra.sweeper.study_name=yours")
    assert lines_with(search(tmp_path, *named, code=1).stderr, "study mine", "yours")
    assert len(starts(tmp_path)) == 1
    (tmp_path / "multirun/mine/optuna.db").write_text("nothing of Optuna's, and long enough to be read as a header")
    assert lines_with(search(tmp_path, *other, code=1).stderr, "optuna.db", "not a study")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["x=1"], "interval("),
        long(["x=interval(0,1)", "wdith=choice(1,2)"], "wdith"),
        long(["x=interval(0,1)", "width=choice(1,two)"], "'two'"),
        long(["x=interval(0,1)", "hydra.sweeper.sampler=tpee"], nearest("tpe")),
        (["x=interval(0,1)", "hydra/launcher=basic"], "hydra/launcher=solo"),
        (["x=interval(0,1)", "hydra.launcher.rerun=failed"], "hydra.sweeper.n_trials"),
    ],
)
def test_search_is_refused_before_a_study_is_created(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in search(tmp_path, *overrides, code=1).stderr
    assert not list(tmp_path.rglob("optuna.db"))
    assert not starts(tmp_path)


def test_task_function_that_returns_no_number_is_refused(tmp_path: Path) -> None:
    done = search(tmp_path, "kind=nothing", "x=interval(0,1)", code=1)
    assert "job 0 returned None" in done.stderr
    assert "trainer.callback_metrics" in done.stderr
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.FAIL]
    (row,) = rows_of(tmp_path)
    assert (row.status, row.detail.startswith("returned None")) == ("failed", True)


@pytest.mark.parametrize("version", ["none", long("2.10.1")])
def test_missing_or_old_optuna_is_refused(tmp_path: Path, version: str) -> None:
    lacks = "sys.modules['optuna'] = None; " if version == "none" else ""
    fakes = f"    {lacks}import importlib.metadata as m; m.version = lambda name: {version!r}\n    train()\n"
    done = search(tmp_path, *SPACE, script=TRAIN.replace("    train()\n", fakes), code=1)
    assert lines_with(done.stderr, "Optuna 4", version, "pip install 'lightning-solo[optuna]'")


@pytest.mark.long
def test_second_command_on_a_study_is_refused(tmp_path: Path) -> None:
    overrides = (*SPACE, "sleep=250", "hydra.sweeper.n_trials=1")
    with begun(tmp_path, *overrides) as first:
        assert f"process {first.pid} works on this sweep" in search(tmp_path, *overrides, code=1).stderr
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=500)
    assert first.returncode == 130
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.RUNNING]  # the first command's alone


def test_sweeper_plugin_loads_without_torch_and_optuna(tmp_path: Path) -> None:
    code = "import sys, hydra_plugins.lightning_solo.sweeper; assert not {'torch', 'optuna'} & set(sys.modules)"
    run(tmp_path, [sys.executable, "-c", code])
