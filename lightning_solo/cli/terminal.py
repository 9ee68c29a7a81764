"""Printing to standard output: tables, and lines without wrapping or markup."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

WIDTH = 120
"""Columns of a table that is not printed to a terminal."""


def table_console() -> Console:
    """Return standard output, wide enough for tables also where it is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Print lines as they are."""
    for line in lines:
        console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)
