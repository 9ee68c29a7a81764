"""Printing lines without wrapping or markup."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Print lines without wrapping, highlights or markup."""
    for line in lines:
        console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)
