"""The parts of a report as plain data: figures, tables, documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_solo.report.palette import Palette
from lightning_solo.tables import Table

Draw = Callable[[Palette], dict[str, Any]]
"""Palette -> Vega-Lite specification, of a width that fits its surroundings."""


@dataclass(frozen=True)
class Figure:
    """A chart, with text and table for readers who can't see it."""

    name: str  # name of the figure's PNG file and of its anchor on the page
    title: str
    caption: str  # the contents of the chart, their source, and omissions
    alternative: str  # text for a screen reader, with the main figures
    draw: Draw
    table: Table  # the data, thinned


@dataclass(frozen=True)
class Report:
    """The contents of a report on a folder."""

    title: str
    facts: dict[str, str] = field(default_factory=dict)  # name -> value, for the head of the page
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)  # title -> text, such as the composed configuration
    notes: list[str] = field(default_factory=list)  # files that could not be read, and why

    def add(self, other: Report) -> None:
        """Add the contents of another report on the same folder."""
        self.facts.update(other.facts)
        self.figures.extend(other.figures)
        self.tables.extend(other.tables)
        self.documents.update(other.documents)
        self.notes.extend(other.notes)

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.figures or self.tables or self.documents)


def plain(text: object) -> str:
    """Return text that can be encoded, with question marks for lone surrogates, as in damaged file names."""
    return str(text).encode("utf-8", errors="replace").decode()
