"""Hydra's source of the techniques: it reads only the cards that are asked for, and lists all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError

from lightning_solo.cards.catalogue import catalogue
from lightning_solo.presets.config_source import TechniqueSource

SOURCE = TechniqueSource("lightning-solo", "lightning-solo://")


def test_composing_reads_only_the_cards_of_the_chosen_techniques() -> None:
    code = (
        "import sys\n"
        "from lightning_solo.presets.compose import compose\n"
        "compose(['compact', 'bf16'], ['precision=bf16-true'])\n"
        "print(*sorted(name.split('.')[2] for name in sys.modules if name.endswith('.card')))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert run.stdout.split() == ["card", "compact_states", "gradient_release"]


@pytest.mark.parametrize("group", ["callback", "strategy"])
def test_every_technique_is_listed_with_its_defaults(group: str) -> None:
    names = SOURCE.list(f"solo/{group}", ObjectType.CONFIG)
    assert names == sorted(catalogue().group(group))
    for name in names:
        config = SOURCE.load_config(f"solo/{group}/{name}").config
        defaults = catalogue().cards[name].defaults
        assert config == ({"name": name, **defaults} if group == "strategy" else {name: defaults})


def test_groups_are_listed_apart_from_configurations() -> None:
    assert SOURCE.list("solo", None) == SOURCE.list("solo", ObjectType.GROUP) == ["callback", "schema", "strategy"]
    assert SOURCE.list("solo/schema", None) == ["solo"]
    assert SOURCE.list("", ObjectType.CONFIG) == []


@pytest.mark.parametrize("path", ["solo/strategy/throughput", "solo/callback/throughputs", "throughput", "solo"])
def test_other_paths_have_no_configuration(path: str) -> None:
    assert not SOURCE.is_config(path)
    with pytest.raises(ConfigLoadError, match=path):
        SOURCE.load_config(path)
