"""What would let two processes wait for one another is refused, and a process that ends ends the other."""

from __future__ import annotations

import re
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
    assert list(messages) == list(ENGINES)
    for engine, message in messages.items():
        expected = mentions("training batches", "4 on rank 0, 6 on rank 1", "drop_last=True")
        assert re.search(expected, message), engine


@pytest.mark.parametrize(
    ("engine", "rank", "how"),
    [("ddp", "1", "leave"), ("ddp", "1", "exit"), ("ddp", "0", "leave")],
)
def test_a_process_that_ends_ends_the_other(engine: str, rank: str, how: str, tmp_path: Path) -> None:
    output = started("ending", tmp_path, engine, rank, how, limit_s=LIMIT_S)
    assert (f"rank {rank} can't go on" in output) == (how != "exit")
    assert ("first process has ended" in output) == (rank == "0")
    assert not (tmp_path / "ending.pt").exists()
