"""What Hydra's grammar means to a search, and what a search refuses to be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.messages import mentions, nearest

pytest.importorskip("optuna")
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_solo.errors import ConflictError, NothingToDoError, PresetError
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.results import Row, read
from lightning_solo.sweeps.search import Search
from lightning_solo.sweeps.search_settings import OBJECTIVES, Settings, settings
from lightning_solo.sweeps.search_space import search_space

DEFAULTS = {
    "n_trials": 20,
    "n_jobs": None,
    "direction": "minimize",
    "objectives": None,
    "sampler": "tpe",
    "seed": 0,
    "pruning": False,
    "monitor": None,
    "prune_after_trials": 5,
    "prune_after_steps": 0,
    "study_name": None,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=a,b", CategoricalDistribution(["a", "b"])),
        ("x=choice(true,1,2.5,'a b',[1,2])", CategoricalDistribution(["True", "1", "2.5", "a\\ b", "[1,2]"])),
        ("x=shuffle(choice(1,2,3))", CategoricalDistribution(["1", "2", "3"])),
        ("x=range(4)", IntDistribution(0, 3)),
        ("x=range(1,10,4)", IntDistribution(1, 9, step=4)),
        ("x=range(1,9,4)", IntDistribution(1, 5, step=4)),  # Hydra's range leaves out its end
        ("x=range(9,1,-4)", IntDistribution(5, 9, step=4)),
        ("x=tag(log,range(1,9))", IntDistribution(1, 8, log=True)),
        ("x=range(0,1,0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
        ("x=interval(0,1)", FloatDistribution(0.0, 1.0)),
        ("x=tag(log,interval(1e-5,1e-2))", FloatDistribution(1e-5, 1e-2, log=True)),
        ("x=int(interval(2,8))", IntDistribution(2, 8)),
        ("x=tag(log,int(interval(2,8)))", IntDistribution(2, 8, log=True)),
    ],
)
def test_overrides_become_distributions(text: str, expected: BaseDistribution) -> None:
    space = search_space([text])
    assert space.distributions == {"x": expected}
    for overrides in space.samples():  # each is an override that Hydra reads, and no sweep
        (parsed,) = OverridesParser.create().parse_overrides(overrides)
        assert not parsed.is_sweep_override()


def test_later_override_of_a_key_wins() -> None:
    space = search_space(["x=interval(0,1)", "+y=1,2", "z=3", "x=0.5", "z=4"])
    assert space.fixed == ("x=0.5", "z=4")
    assert list(space.distributions) == ["+y"]
    assert space.overrides({"+y": "2"}) == ["x=0.5", "z=4", "+y=2"]


def test_samples_cover_each_choice_and_each_end() -> None:
    space = search_space(["x=a,b,c", "y=interval(1,2)"])
    assert space.samples() == [["x=a", "y=1.0"], ["x=b", "y=1.0"], ["x=c", "y=1.0"], ["x=a", "y=2.0"]]


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        (["x=1", "y=2"], NothingToDoError, ["x=1, y=2", "interval(1e-5, 1e-2)"]),
        ([], NothingToDoError, ["no overrides"]),
        (["x=range(3,3)"], PresetError, ["x=range(3,3)", "empty"]),
        (["x=interval(3,1)"], PresetError, ["x=interval(3,1)", "low=3.0, high=1.0"]),
        (["x=tag(log,interval(0,1))"], PresetError, ["low > 0"]),
        (["x=tag(lgo,interval(0,1))"], PresetError, ["'lgo'", nearest("log")]),
        (["x=tag(log,choice(1,2))"], PresetError, ["'log'", "intervals and ranges"]),
        (["x=tag(log,range(1,9,2))"], PresetError, ["step"]),
    ],
)
def test_invalid_space_is_refused(texts: list[str], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        search_space(texts)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"sampler": "tpee"}, PresetError, ["sampler=tpee", nearest("tpe"), "tpe, random, nsga2"]),
        ({"direction": "min"}, PresetError, ["direction=min", "minimize, maximize"]),
        ({"objectives": ["value", "memory"]}, PresetError, ["objectives=memory", nearest("peak_memory")]),
        ({"n_trials": 0}, PresetError, ["n_trials=0", "1 or more"]),
        ({"n_trial": 2}, PresetError, ["hydra.sweeper.n_trial=2", nearest("n_trials")]),
        ({"n_jobs": 0}, PresetError, ["n_jobs=0"]),
        ({"seed": -1}, PresetError, ["seed=-1", "null"]),
        ({"direction": ["minimize"] * 2, "objectives": ["value"]}, ConflictError, ["[minimize,minimize]", "[value]"]),
        ({"direction": ["minimize"] * 2, "pruning": True}, ConflictError, ["pruning=true", "pruning=false"]),
        ({"objectives": ["value", "seconds"], "pruning": True}, ConflictError, ["[value,seconds]"]),
        ({"direction": "maximize", "pruning": True}, PresetError, ["maximize", "hydra.sweeper.monitor=val_accuracy"]),
        ({"objectives": ["peak_memory"], "pruning": True}, ConflictError, ["peak_memory", "value"]),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        settings({**DEFAULTS, **given}, 1)
    assert all(word in str(caught.value) for word in words), caught.value


def test_missing_settings_get_defaults() -> None:
    assert settings(DEFAULTS, 3).n_jobs == 3
    assert settings(DEFAULTS, 3).objectives == ["value"]
    assert settings({**DEFAULTS, "direction": ["minimize"] * 2}, 1).objectives == ["value", "peak_memory"]
    two = settings({**DEFAULTS, "direction": "maximize", "objectives": ["value", "seconds"]}, 1)
    assert two.direction == ["maximize", "maximize"]


def test_peak_memory_is_that_of_the_device_if_there_is_one() -> None:
    row = Row(0, (), "finished", peak_device_bytes=5, peak_host_bytes=7)
    assert OBJECTIVES["peak_memory"](row) == 5
    assert OBJECTIVES["peak_memory"](Row(0, (), "finished", peak_host_bytes=7)) == 7


def test_trial_without_a_number_is_a_failed_job(tmp_path: Path) -> None:
    search = object.__new__(Search)
    search.folder, search.settings = SweepFolder(tmp_path), Settings()
    study = optuna.create_study()
    study.ask()
    with pytest.raises(PresetError, match=mentions("job 0 ", "None", "needs a number")):
        search._settle(study, Row(0, ("x=1",), "finished"))
    (row,) = read(search.folder.results)
    assert (row.status, row.overrides, "number" in row.detail) == ("failed", ("x=1",), True)
    assert study.trials[0].state.name == "FAIL"
