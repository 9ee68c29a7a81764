"""What a card says of an engine is true of two processes: the engine's bits, or the technique's on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.engines import ENGINES, EXACT
from tests.engines.cards import answers, trained
from tests.engines.processes import run

PARTS = 4
"""Runs of two processes for an engine, each with some of the techniques, so that each ends in time."""
ROUNDED = 1e-5  # of the updates' size; sums in another order give up to 4e-7
ROUNDED_BY_BATCH = {"low_precision_matmul": 0.1}
"""Techniques that round by the numbers of a batch, of which each process has its part -> the allowed difference."""


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the mean difference of updates, relative to their mean size."""
    assert one.keys() == other.keys()
    assert one
    a, b = (torch.cat([updates[name].flatten() for name in sorted(one)]) for updates in (one, other))
    return float((a - b).abs().mean() / b.abs().mean())


def complaint(name: str, answer: str, result: dict[str, Any], alone: dict[str, Any], folder: Path) -> str | None:
    """Return how the result under an engine differs from what the card says; None if it doesn't."""
    if "error" in result:
        return f"failed: {result['error'][-1500:]}"
    if not result["steps"] or not any(update.abs().max() > 0 for update in result["updates"].values()):
        return "nothing was trained"
    if answer == EXACT:
        equal = {key: torch.equal(value, alone["updates"][key]) for key, value in result["updates"].items()}
        return None if all(equal.values()) and result["losses"] == alone["losses"] else f"other bits: {equal}"
    expected = trained(folder, built_in_cards()[name], devices=1, dropout=False)
    if result["steps"] != expected["steps"]:
        return f"{result['steps']} steps for {expected['steps']}"
    change = difference(result["updates"], expected["updates"])
    return None if change < ROUNDED_BY_BATCH.get(name, ROUNDED) else f"updates differ by {change:.3g} of their size"


def names_of(engine: str, part: int) -> list[str]:
    """Return every `PARTS`-th technique that an engine allows."""
    return list(answers(engine))[part::PARTS]


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_as_the_cards_say(engine: str, part: int, tmp_path: Path) -> None:
    names, said = names_of(engine, part), answers(engine)
    results = run("cards", tmp_path, engine, *names)
    alone = results.pop("alone")
    assert list(results) == names
    assert len(names) > 3
    complaints = {name: complaint(name, said[name], results[name], alone, tmp_path) for name in names}
    assert {name: text for name, text in complaints.items() if text} == {}
