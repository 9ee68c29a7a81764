"""The ready search spaces: every key and every value of them is one that the application takes."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from lightning_solo.cli.command_line import check_command_line, compose_application
from lightning_solo.sweeps.search_settings import settings
from lightning_solo.sweeps.search_space import search_space

MODULE = ["model._target_=my_project.MyModule", "allow=[my_project]"]


@pytest.mark.parametrize(
    ("arguments", "searched"), [(["experiment=search_byte_gpt"], 6), (["experiment=search_fine_tuning", *MODULE], 4)]
)
def test_each_value_is_one_that_the_application_takes(arguments: list[str], searched: int) -> None:
    check_command_line(["-m", *arguments])
    sweeper = OmegaConf.to_container(compose_application(arguments).hydra.sweeper)
    assert isinstance(sweeper, dict)
    del sweeper["_target_"]
    space = search_space([f"{key}={value}" for key, value in sweeper.pop("params").items()])
    assert len(space.distributions) == searched
    assert settings({str(key): value for key, value in sweeper.items()}, 1).pruning
    for sample in space.samples():
        check_command_line([*arguments, *sample])
