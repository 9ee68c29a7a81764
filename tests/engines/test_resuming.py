"""A run on two processes that is killed and resumed equals the undisturbed one to the bit, in both processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.errors import CheckpointError
from lightning_solo.techniques.exact_resume.technique import ExactResume
from tests.engines.processes import run, started
from tests.engines.resuming import BATCHES, EPOCHS, LAST, SAVED

pytestmark = pytest.mark.long


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_each_process_ends_with_the_bits_of_an_undisturbed_run(engine: str, tmp_path: Path) -> None:
    started("resuming:killed", tmp_path, engine)
    assert (tmp_path / "killed" / f"{LAST}.ckpt").exists()
    assert not (tmp_path / "killed" / f"{LAST + 1}.ckpt").exists()
    ends = run("resuming:resumed", tmp_path, engine)
    whole = ends.pop("whole")
    assert set(ends) == {"killed", *(f"batch {batch}" for batch in SAVED[engine])}
    assert whole[0]["random"][1] != whole[1]["random"][1]
    assert not torch.equal(whole[0]["random"][0], whole[1]["random"][0])
    for name, processes in ends.items():
        for end, expected in zip(processes, whole, strict=True):
            assert len(expected["seen"]) == EPOCHS * BATCHES
            done = LAST if name == "killed" else int(name.split()[1])
            assert end.pop("seen") == expected["seen"][done:], name
            assert_equal(end, {key: value for key, value in expected.items() if key != "seen"}, name)


@pytest.mark.parametrize("failing", ["0", "1", "01"])
def test_checkpoint_of_a_failure_is_continued_if_all_processes_failed(failing: str, tmp_path: Path) -> None:
    output = started("resuming:failed", tmp_path, *failing)
    assert "three steps" in output
    (path,) = tmp_path.glob("*.ckpt")
    states = torch.load(path, weights_only=True)["callbacks"]
    (ranks,) = (state["ranks"] for name, state in states.items() if "ExactResume" in name)
    if failing == "01":
        ExactResume().load_state_dict(ranks[1])
        assert not torch.equal(ranks[0]["random"]["torch"], ranks[1]["random"]["torch"])
    else:
        with pytest.raises(CheckpointError, match="failure in one process"):
            ExactResume().load_state_dict(ranks[1])


def assert_equal(one: Any, other: Any, path: str) -> None:
    if isinstance(other, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(other, dict):
        assert one.keys() == other.keys(), path
        for key in other:
            assert_equal(one[key], other[key], f"{path}, {key}")
    elif isinstance(other, list):
        for part, same in zip(one, other, strict=True):
            assert_equal(part, same, path)
    else:
        assert one == other, path
