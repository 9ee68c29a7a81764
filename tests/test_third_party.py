"""Modules of other libraries train under every exact preset as `examples/results/third_party_cpu.json` says."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = sorted(path.stem for path in (EXAMPLES / "third_party" / "conf" / "experiment").glob("*.yaml"))
STORED: dict[str, Any] = json.loads((EXAMPLES / "results" / "third_party_cpu.json").read_text(encoding="utf-8"))


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that trains them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("measure_third_party")


def stored_results(name: str, has_gpu: bool) -> dict[str, str]:
    """Return preset -> result of a module; with a GPU without those presets that were refused for want of one."""
    return {
        preset: found["result"]
        for preset, found in STORED["modules"][name].items()
        if not (has_gpu and found.get("why", "").startswith("CapabilityError"))
    }


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_under_every_exact_preset_or_is_refused_with_its_reason(name: str, third_party: Any) -> None:
    assert set(STORED["modules"][name]) == set(third_party.exact_presets())
    stored = stored_results(name, torch.cuda.is_available())
    state = torch.random.get_rng_state()
    with patch.dict(os.environ):  # some libraries set variables when they are imported
        pytest.importorskip(third_party.library_of(name))
        results = third_party.measure([name], list(stored))[name]
    torch.random.set_rng_state(state)
    assert {preset: result["result"] for preset, result in results.items()} == stored


def test_a_machine_with_a_gpu_does_not_expect_the_refusals_of_one_without() -> None:
    for name in MODULES:
        assert stored_results(name, has_gpu=False)["fp16"] == "refused"
        assert stored_results(name, has_gpu=False).keys() - stored_results(name, has_gpu=True).keys() == {"fp16"}


def test_no_module_differs_or_fails_under_an_exact_preset_and_each_refusal_says_what_to_write() -> None:
    assert set(STORED["modules"]) == set(MODULES)
    assert len(MODULES) >= 25
    for name, presets in STORED["modules"].items():
        assert any(result["result"] == "equal to the bit" for result in presets.values()), name
        for preset, result in presets.items():
            words = result.get("why", "")
            assert not result["result"].startswith(("differs", "failed", "trains")), (name, preset)
            if result["result"] == "refused":
                assert re.search(r"write .*=|use bf16-mixed", words), words
