"""The page on adding a technique: its code runs, its tables name every field of a card and every seam."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.cards.card import RESOURCES, Card
from lightning_solo.cards.phase import Phase
from lightning_solo.seams.technique import Technique
from tests.pages import TABLES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding_a_technique.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "own_technique"


def first_cells(header: str) -> set[str]:
    """Return the names in code font in the first column of the table with a header."""
    table = PAGE[PAGE.index(header) :].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)", line.split("|")[1])}


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)  # this repository's own page
    card, cls = namespace["CARD"], namespace["FrozenEmbeddings"]
    assert card.check({}).min_rows == 256
    assert repr(cls(7)) == "FrozenEmbeddings(min_rows=7)"
    assert issubclass(cls, Technique)


def test_the_preset_is_that_of_the_example() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    preset = EXAMPLE / "frozen_embeddings" / "conf" / "solo" / "fine_tuning.yaml"
    assert block == preset.read_text(encoding="utf-8")


def test_the_entry_point_is_that_of_the_example() -> None:
    block, package_data = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert package_data == '[tool.setuptools.package-data]\nfrozen_embeddings = ["conf/**/*.yaml"]\n'
    assert block in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8") + "\n"


def test_every_field_of_a_card_every_phase_and_every_resource_is_named() -> None:
    assert first_cells("| field | what it is for") == {field.name for field in fields(Card)}
    assert all(f"`{phase.name}`" in PAGE for phase in Phase)
    assert set(re.findall(r"^\| `(\w+)`", TABLES.resources(), re.MULTILINE)) == set(RESOURCES)
    assert "```{resources}\n```" in PAGE


def test_every_seam_is_named() -> None:
    hooks = {"setup", "teardown", "overrides", "phase", "ctx", "joins_evaluation"}
    seams = {name for name in vars(Technique) if not name.startswith(("_", "on_"))} - hooks
    assert first_cells("| seam | when | returns |") == seams


def test_every_file_that_it_names_is_in_the_example() -> None:
    for path in re.findall(r"^\| `(frozen_embeddings/[^`]+)`", PAGE, re.MULTILINE):
        assert (EXAMPLE / path).is_file()
