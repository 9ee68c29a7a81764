"""Printing to standard output: tables, and lines without wrapping or markup."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

WIDTH = 120
"""Width of a table that is printed to a file."""


def table_console() -> Console:
    """Return a console on standard output that is wide enough for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Print lines without wrapping, highlights or markup."""
    for line in lines:
        console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)
