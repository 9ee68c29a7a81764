"""Names of earlier versions are refused with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import initialize_config_dir
from hydra.errors import CompactHydraException

import lightning_solo as solo
from lightning_solo.cli.command_line import check_command_line
from lightning_solo.cli.plan_line import parse
from lightning_solo.errors import PresetError
from lightning_solo.presets.compose import VERSION_BASE, compose
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.old_spellings import PRESETS, callbacks_of
from tests.messages import mentions

BOTH = "+callback=[compact_states,gradient_release]"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy=compact", BOTH),
        ("+strategy=compact", BOTH),
        ("strategy.state_budget=8GiB", "write callback.compact_states.state_budget=8GiB"),
        ("strategy.back_end=flashoptim", "write callback.compact_states.back_end=flashoptim"),
        ("strategy.release_gradients=false", "write ~callback.gradient_release"),
        ("strategy.gradient_buffer=host", "write callback.gradient_release.buffer=host"),
        ("+strategy.master_bits=32", "write callback.compact_states.master_bits=32"),
    ],
)
def test_overrides_are_refused_with_the_new_ones(override: str, words: str) -> None:
    with pytest.raises(PresetError, match=mentions(words)):
        compose("compact", [override])
    line = override.replace("strategy.", "solo.strategy.").replace("strategy=", "solo/strategy=")
    with pytest.raises(PresetError, match=mentions(words)):
        check_command_line(["solo=compact", line])
    if "." in override and not override.startswith("+"):  # without the prefix
        with pytest.raises(PresetError, match=mentions(words)):
            check_command_line(["solo=compact", override])


@pytest.mark.parametrize("override", ["trainer.strategy=compact", "+trainer.strategy=compact"])
def test_the_trainers_old_strategy_is_refused(override: str) -> None:
    words = mentions("drop trainer.strategy", "the preset compact")
    with pytest.raises(PresetError, match=words):
        check_command_line([override])
    with pytest.raises(PresetError, match=words):
        solo.trainer({"strategy": "compact"}, "baseline")
    with pytest.raises(PresetError, match=words):
        solo.trainer({}, "baseline", strategy="compact")


def test_hydra_says_it_to_applications(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults:\n  - solo: baseline\n")
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        with pytest.raises(CompactHydraException, match=mentions("the preset compact")):
            hydra.compose("app", overrides=["+solo/strategy=compact"])


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("compact", "write the preset compact"),
        ({"compact": None}, "write the preset compact"),
        ({"compact": {"master_bits": 32}}, "compact and callback.compact_states.master_bits=32"),
        (
            {"name": "compact", "gradient_buffer": "host"},
            "compact and callback.gradient_release.buffer=host",
        ),
        ({"_target_": "lightning_solo.CompactStrategy"}, "CompactStates(...), GradientRelease(...)"),
    ],
)
def test_fields_are_refused_with_the_new_ones(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(PresetError, match=mentions(words)):
        compose({"precision": "bf16-true", "strategy": strategy}, allow=["lightning_solo"])


def test_the_class_is_refused_with_the_new_ones() -> None:
    with pytest.raises(AttributeError, match=mentions("CompactStates(...), GradientRelease(...)")):
        _ = solo.CompactStrategy


def test_gradients_that_were_kept_are_kept() -> None:
    kept = callbacks_of({"name": "compact", "moment_bits": 4, "release_gradients": False})
    assert kept == {"compact_states": {"moment_bits": 4}}


def test_settings_of_another_strategy_are_left_alone() -> None:
    with pytest.raises(PresetError, match="no module"):
        solo.trainer_kwargs({"strategy": {"_target_": "nowhere.Mine", "back_end": "x"}}, allow=["nowhere"])


@pytest.mark.parametrize("name", PRESETS)
def test_an_old_preset_is_refused_with_a_present_one(name: str) -> None:
    for use in (lambda: compose(name), lambda: compose(["bf16", name]), lambda: parse(["--presets", f"bf16,{name}"])):
        with pytest.raises(PresetError, match=mentions(repr(name), "was removed", "write ")) as raised:
            use()
        assert any(preset in str(raised.value) for preset in preset_files())
