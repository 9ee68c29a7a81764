"""What would let two processes wait for one another is refused, and a process that ends ends the other."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.engines.processes import ENGINES, run, started
from tests.messages import mentions

LIMIT_S = 300  # of processes that would otherwise wait for `timeout_s`, which is 1800
pytestmark = pytest.mark.long


def test_different_numbers_of_batches_or_parts_are_refused(tmp_path: Path) -> None:
    messages = run("uneven", tmp_path, limit_s=LIMIT_S)
    parts = messages.pop("parts")
    assert re.search(mentions("parts of a batch", "2 on rank 0, 4 on rank 1"), parts)
    for engine in ENGINES:
        for kind, name in (("training", engine), ("validation", f"{engine}, validation")):
            expected = mentions(f"{kind} batches", "4 on rank 0, 6 on rank 1", "drop_last=True")
            assert re.search(expected, messages.pop(name)), name
    assert not messages


@pytest.mark.parametrize(
    ("engine", "rank", "how"),
    [
        ("ddp", "1", "leave"),
        ("ddp", "1", "exit"),
        ("fsdp", "1", "kill"),
        ("ddp", "0", "kill"),
        ("ddp", "0", "leave"),
        ("zero3", "0", "leave"),
        ("fsdp", "0", "leave"),
    ],
)
def test_a_process_that_ends_ends_the_other(engine: str, rank: str, how: str, tmp_path: Path) -> None:
    started_s = time.monotonic()
    output = started("ending", tmp_path, engine, rank, how, limit_s=LIMIT_S)
    print(f"{time.monotonic() - started_s:.0f} s\n{output[-3000:]}")
    assert (f"rank {rank} can't go on" in output) == (how == "leave")
    assert ("process 1 was ended by SIGKILL\n" in output) == (how == "kill" and rank == "1")
    assert ("ended with exit status 3\n" in output) == (how == "exit")
    assert ("first process has ended" in output) == (rank == "0")
    assert not (tmp_path / "ending.pt").exists()


def test_a_signal_to_either_process_saves_one_checkpoint_and_ends_both(tmp_path: Path) -> None:
    for case, result in run("terminated", tmp_path, "ddp", "fsdp", limit_s=LIMIT_S).items():
        assert result["codes"] == [143, 143], case
        assert result["files"] == ["last.ckpt"], case
        assert len(result["rest"]) == 2, case
        assert result["rest"] == result["whole"][2:], case


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_a_refusal_in_one_process_is_what_the_others_say(engine: str, tmp_path: Path) -> None:
    output = started("ending", tmp_path, engine, "1", "refuse", limit_s=LIMIT_S)
    last = output[output.rindex("Error: ") :]
    assert re.search(mentions("this process", "write another batch"), last)
    if engine != "zero3":  # whose first process may be ended before it says anything
        assert "rank 1 failed first: lightning_solo.errors.ConflictError" in output
