"""Between Hydra and a sweep: which commands share a folder, which jobs are counted, and which settings are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.job_process import VARIABLE
from lightning_solo.sweeps.jobs import Settings
from lightning_solo.sweeps.launch import check_product, job_return, quoted, refuse_ranks, sweep_dir
from lightning_solo.sweeps.results import Row
from tests.messages import mentions

LOADER = Mock(ConfigLoader)  # composes the first job, and has no groups
APPLICATION = Application("train", "/a/train.py", "train", 1, (), ())


def test_folder_differs_by_application_configuration_and_overrides(tmp_path: Path) -> None:
    for name in ("config", "other"):
        (tmp_path / f"{name}.yaml").write_text("n: 0\n")

    def folder(application: Application = APPLICATION, name: str = "config", overrides: tuple[str, ...] = ()) -> str:
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            config = compose(name, [*overrides, f"hydra.job.config_name={name}"], return_hydra_config=True)
        return sweep_dir(config, application)

    folders = [
        folder(),
        folder(replace(APPLICATION, file="/b/train.py")),
        folder(replace(APPLICATION, function="other")),
        folder(name="other"),
        folder(overrides=("n=1",)),
    ]
    assert len(set(folders)) == 5
    assert folder() == folders[0]
    assert folder(replace(APPLICATION, path=("/c",), arguments=("train.py", "hydra.launcher.parallel=2"))) == folders[0]


def config(target: str, *overrides: str, **params: str) -> Any:
    sweeper = {"_target_": target, "params": params}
    return OmegaConf.create({"hydra": {"sweeper": sweeper, "overrides": {"task": list(overrides)}}})


def test_jobs_of_the_basic_sweeper_are_counted() -> None:
    basic = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    check_product(config(basic, "a=1,2", "b=range(5)"), 10, LOADER)
    with pytest.raises(PresetError, match=mentions("10 jobs (5 x 2)")):
        check_product(config(basic, "a=1,2", b="range(5)"), 9, LOADER)
    with pytest.raises(PresetError, match=mentions("a=range(5,5)", "a=range(1,5)")):
        check_product(config(basic, "a=range(5,5)"), 9, LOADER)
    with pytest.raises(PresetError, match=mentions("step of 0", "range(1,5,1)")):
        check_product(config(basic, "a=range(1,5,0)"), 9, LOADER)
    check_product(config("another.Sweeper", "a=range(1000)"), 9, LOADER)  # it decides by itself what it makes of that


@pytest.mark.parametrize(
    "text", ["plain", "it's", r"back\slash", "ends\\", r"a\'b", r"\\'", "a,b=[c]", "{a: b}", " spaces ", '"']
)
def test_quoted_text_is_parsed_as_the_text(text: str) -> None:
    assert OverridesParser.create().parse_override(f"a={quoted(text)}").value() == text


def test_job_return_has_the_value_or_raises_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    config = OmegaConf.create({"n": 1, "hydra": {"job": {"name": "train"}}})
    row = Row(0, ("n=1",), "finished", returned=1.5, folder="a/0")
    done = job_return(config, row, KeyError())
    assert (done.return_value, done.cfg, done.working_dir, done.overrides) == (1.5, {"n": 1}, "a/0", ["n=1"])
    with pytest.raises(KeyError):
        _ = job_return(config, replace(row, status="failed"), KeyError()).return_value
    assert capsys.readouterr().err == ""  # the error names all jobs, and Hydra's own return this one


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("parallel", 0, "1 or more"),
        *((name, -1, "0 or more") for name in ("retries", "grace_s", "output_mib", "tail_lines")),
        ("timeout_s", -1.0, "positive"),
        ("rerun", "some", "never, failed, all"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(PresetError, match=mentions(f"hydra.launcher.{name}={value!r}: ", said)):
        Settings(**{name: value})


def test_sweep_that_a_jobs_trainer_starts_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning starts the command again for each further device, with the job's environment and a rank."""
    refuse_ranks()
    monkeypatch.setenv(VARIABLE, "a/.sweep/jobs/0")
    refuse_ranks()
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConflictError, match=mentions("solo.devices", "hydra.launcher.gpus=auto")):
        refuse_ranks()
