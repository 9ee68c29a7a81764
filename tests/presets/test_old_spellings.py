"""Presets of earlier versions are refused with what to write instead."""

from __future__ import annotations

import pytest

from lightning_solo.cli.plan_line import parse
from lightning_solo.errors import PresetError
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.old_spellings import PRESETS
from tests.messages import mentions


@pytest.mark.parametrize("name", PRESETS)
def test_an_old_preset_is_refused_with_a_present_one(name: str) -> None:
    for use in (lambda: compose(name), lambda: compose(["bf16", name]), lambda: parse(["--presets", f"bf16,{name}"])):
        with pytest.raises(PresetError, match=mentions(repr(name), "earlier version", "write ")) as raised:
            use()
        assert any(preset in str(raised.value) for preset in preset_files())
