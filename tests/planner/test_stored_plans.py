"""Plans of small architectures keep the bytes that they had when all blocks were traced."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("transformers")

from lightning_solo.planner import few_blocks
from lightning_solo.planner.equal_blocks import equal_runs
from lightning_solo.planner.fake_modules import empty_parameters
from tests.planner.stored_plans import ARCHITECTURES, planned, stored

LEAST = few_blocks.LEAST


@pytest.fixture(autouse=True)
def few_blocks_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise five equal blocks, which a plan wouldn't trace in parts."""
    monkeypatch.setattr(few_blocks, "LEAST", 5)


def test_bytes_equal_the_stored_ones() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert planned("encoder", ["bf16"])["bf16"] == stored()["encoder"]["bf16"]


def test_three_architectures_have_blocks_enough_for_traces_in_parts() -> None:
    with empty_parameters():
        lengths = [
            [run.length for run in equal_runs(make(), 5)] for make, _ in (ARCHITECTURES[name] for name in stored())
        ]
    assert len(stored()) >= 12
    assert sum(max(each, default=0) >= LEAST for each in lengths) >= 3


@pytest.mark.long
@pytest.mark.parametrize("architecture", stored())
def test_bytes_of_all_presets_equal_the_stored_ones(architecture: str) -> None:
    expected = stored()[architecture]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert planned(architecture, expected) == expected
