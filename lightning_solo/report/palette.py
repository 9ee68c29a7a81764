"""Colours and dashes of charts and page; their contrast is tested against WCAG 2.2's 4.5 (text) and 3 (marks)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Palette:
    """Colours as CSS takes them."""

    ink: str
    muted: str
    ground: str
    line: str
    link: str
    marks: tuple[str, ...]


LIGHT = Palette(
    ink="#1b1f24",
    muted="#57606a",
    ground="#ffffff",
    line="#d5dae0",
    link="#0550ae",
    marks=("#0b5cad", "#b34700", "#00705a", "#8239b8", "#b3195f", "#6b6400", "#4b5a6b"),
)
DARK = Palette(
    ink="#e8edf2",
    muted="#a5b1bd",
    ground="#14181d",
    line="#2d353e",
    link="#7cb8ff",
    marks=("#6cb6ff", "#ffa869", "#4fd1ae", "#cfa6ff", "#ff8fbf", "#ddcf55", "#a9b8c8"),
)
SCREEN = Palette(  # the page's variables, so that charts turn dark with the system
    ink="var(--ink)",
    muted="var(--muted)",
    ground="var(--ground)",
    line="var(--line)",
    link="var(--link)",
    marks=tuple(f"var(--mark-{i})" for i in range(len(LIGHT.marks))),
)
DASHES = ([1, 0], [6, 3], [2, 2], [10, 4, 2, 4], [12, 4])
"""5 dashes and 7 colours make 35 pairs before one repeats."""
