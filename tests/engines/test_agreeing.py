"""Processes take the same decision where each one's numbers would lead to another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.engines.agreeing import guarded
from tests.engines.processes import run
from tests.messages import mentions

LIMIT_S = 600
TOLERANCE = 1e-5
pytestmark = pytest.mark.long


def test_a_wrong_loss_in_one_process_skips_or_stops_the_step_in_both(tmp_path: Path) -> None:
    results = run("agreeing:guard", tmp_path, limit_s=LIMIT_S)
    alone = guarded(tmp_path, "", float("inf"), 0, "skip_window", devices=1)
    assert alone["steps"] == [[3, 1]]
    for case, result in results.items():
        _, policy, wrong, process = case.split()
        if policy == "stop":
            own = result["refusals"].pop(int(process))
            assert f"the loss is {wrong}" in own, case
            (other,) = result["refusals"]
            assert "another process" in other or "gradient" in other, case
            continue
        assert result["steps"] == [[3, 1]] * 2, case
        assert result["losses"] == pytest.approx(alone["losses"], rel=0, abs=TOLERANCE), case
        for name, value in result["weights"].items():
            torch.testing.assert_close(value, alone["weights"][name], rtol=0, atol=1e-4, msg=f"{case} {name}")
    assert any("another process" in refusal for each in results.values() for refusal in each.get("refusals", ()))


def test_an_infinite_gradient_in_one_shard_skips_the_step_of_compact_states_in_both(tmp_path: Path) -> None:
    assert run("agreeing:shards", tmp_path, limit_s=LIMIT_S) == [[3, 1]] * 2


def test_processes_with_different_seeds_skip_the_same_blocks(tmp_path: Path) -> None:
    results = run("agreeing:draws", tmp_path, limit_s=LIMIT_S)
    assert list(results) == ["ddp", "fsdp"]
    for engine, (first, second) in results.items():
        assert first == second, engine
        assert len(first) == 4
        assert all(len(skipped) == 1 for skipped in first), engine
        assert len({tuple(skipped) for skipped in first}) > 1, engine


def test_a_projection_between_features_is_refused_since_nothing_averages_its_gradients(tmp_path: Path) -> None:
    message = run("agreeing:projection", tmp_path, limit_s=LIMIT_S)
    assert re.search(mentions("width 32", "2 processes", "devices=1", "one width"), message)


def test_memory_is_written_once_as_the_largest_and_the_host_is_shared_out(tmp_path: Path) -> None:
    result = run("agreeing:observed", tmp_path, limit_s=LIMIT_S)
    rows, ((first, share), (second, other)) = result["rows"], result["each"]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4]
    assert second > first + 100 * 2**20
    assert int(rows[2]["resident_bytes"]) >= second - 20 * 2**20
    assert share + other < 1.2 * result["total"]
