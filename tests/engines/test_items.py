"""Techniques that make the batches split each one over the processes, in the order of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.items import SAVED, STEPS, TECHNIQUES, seen
from tests.engines.processes import run

ENGINES = ("ddp", "fsdp", "zero3")


@pytest.mark.long
def test_two_processes_see_the_batches_of_one_with_twice_the_size(tmp_path: Path) -> None:
    results = run("items:split", tmp_path, *ENGINES)
    for kind, settings in TECHNIQUES.items():
        ((whole),) = seen(tmp_path, "", kind, 1) if not {"rows", "max_tokens"} & settings.keys() else [None]
        for engine in ENGINES:
            first, second = results[f"{kind}-{engine}"]
            assert len(first) == len(second) == STEPS
            assert first != second
            assert results[f"{kind}-{engine} resumed"] == [first[SAVED:], second[SAVED:]]
            assert [first, second] == results[f"{kind}-ddp"]
            if whole is not None:
                assert [sorted({*a, *b}) for a, b in zip(first, second, strict=True)] == whole
