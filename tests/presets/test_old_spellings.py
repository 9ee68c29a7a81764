"""Names of earlier versions are refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

import lightning_solo as solo
from lightning_solo.cli.command_line import check_command_line
from lightning_solo.cli.plan_line import parse
from lightning_solo.errors import PresetError
from lightning_solo.presets.compose import compose
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


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"name": "compact", "master_bits": 32, "gradient_buffer": "host"}, "'master_bits': 32"),
        ({"name": "compact", "master_bits": 32, "gradient_buffer": "host"}, "'gradient_release': {'buffer': 'host'}"),
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
