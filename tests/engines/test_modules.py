"""Modules of many kinds train under `fsdp` by name as one process does, or are refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.engines.modules import BUILDERS, fit, seeded
from tests.engines.processes import run, started
from tests.messages import mentions

TOLERANCE = 1e-5
REFUSED = {
    "adversarial": mentions("Adversarial.automatic_optimization=False", "ddp or zero3"),
    "scalar": mentions("FSDP2 and net.scale", "torch.tensor([0.5])", "preset ddp"),
}


@pytest.mark.long
def test_each_module_trains_under_fsdp_as_in_one_process(tmp_path: Path) -> None:
    results = run("modules:under", tmp_path, "fsdp")
    assert results.keys() == BUILDERS.keys()
    for name, message in REFUSED.items():
        assert re.search(message, results.pop(name)["error"]), name
    assert len(results) >= 9
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result.get('error')}"
        expected = fit(name, tmp_path, "baseline", 1)
        assert len(set(expected["losses"])) == 3, name
        assert result["losses"] == pytest.approx(expected["losses"], rel=0, abs=TOLERANCE), name
        assert result["weights"].keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            torch.testing.assert_close(result["weights"][key], value, rtol=0, atol=TOLERANCE, msg=f"{name} {key}")


@pytest.mark.long
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_parameter_that_is_a_number_trains_under_zero3_as_in_one_process(stage: str, tmp_path: Path) -> None:
    result = run("modules:under_stage", tmp_path, stage, "scalar")
    expected = fit("scalar", tmp_path, "baseline", 1)
    assert result["losses"] == pytest.approx(expected["losses"], rel=0, abs=TOLERANCE)
    for key, value in expected["weights"].items():
        torch.testing.assert_close(result["weights"][key], value, rtol=0, atol=TOLERANCE, msg=key)
    assert expected["weights"]["net.scale"] != 0.5


@pytest.mark.long
@pytest.mark.parametrize("engine", ["fsdp", "zero2", "zero3"])
def test_a_layer_that_one_process_leaves_out_is_named_within_a_minute(engine: str, tmp_path: Path) -> None:
    output = started("modules:skipping", tmp_path, engine, limit_s=300)
    assert re.search(mentions("rank 0 ran net.layers.1; rank 1 ran no other", "find_unused_parameters=true"), output)


@pytest.mark.long
def test_weights_that_are_random_in_each_process_become_the_first_ones_under_fsdp(tmp_path: Path) -> None:
    losses = run("modules:seeded", tmp_path, "fsdp")["losses"]
    assert losses == pytest.approx(seeded(tmp_path, "baseline")["losses"], rel=0, abs=TOLERANCE)
