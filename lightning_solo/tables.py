"""Tables whose columns are defined once, and rendered for the terminal, an HTML page, Markdown or CSV.

The page's own template, `report/page.html`, renders a `Table` as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lightning_solo.units import format_bytes, format_duration

WIDTH = 120
"""Width of a table that is printed to a file, in characters."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Cell:
    """A text, and its value; both are empty if nothing is known."""

    text: str = ""
    value: float | str | None = None  # for sorting and for CSV; numbers are aligned to the right
    style: str = ""  # rich's style on the terminal

    @property
    def is_number(self) -> bool:
        """Whether the value is a number, which is aligned to the right."""
        return isinstance(self.value, float | int)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A heading, and a function that returns the cell of a row."""

    heading: str
    cell: Callable[[Row], Cell]


@dataclass(frozen=True)
class Table:
    """A table with a heading for each column; readers of a page can sort a `sortable` one."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = False

    @property
    def numeric(self) -> list[bool]:
        """Whether each column has numbers and is therefore aligned to the right."""
        return [any(row[n].is_number for row in self.rows) for n in range(len(self.headings))]

    @property
    def width(self) -> int:
        """Characters of a row with one space between columns."""
        texts = [self.headings, *([cell.text for cell in row] for row in self.rows)]
        return sum(max(map(len, column)) for column in zip(*texts, strict=True)) + len(self.headings) - 1


def filled_table(caption: str, columns: Iterable[Column[Row]], rows: Sequence[Row], *, sortable: bool = False) -> Table:
    r"""Return a table without the columns that are empty in all rows.

    >>> columns = (Column("name", Cell), Column("length", lambda text: number(len(text))), Column("", lambda _: Cell()))
    >>> print(markdown(filled_table("", columns, ["a|b"])), end="")
    | name | length |
    | --- | ---: |
    | a\|b | 3 |
    """
    drawn = [(column.heading, [column.cell(row) for row in rows]) for column in columns]
    drawn = [(heading, cells) for heading, cells in drawn if any(cell.text for cell in cells)]
    lines = [tuple(cells[n] for _, cells in drawn) for n in range(len(rows))]
    return Table(caption, tuple(heading for heading, _ in drawn), lines, sortable)


def terminal(
    table: Table, wrapped: Collection[str] | None = None, *, headings: bool = True, narrow: bool = False
) -> RichTable:
    """Return the table for rich to print.

    Args:
        table: the table.
        wrapped: headings of the columns that may take several lines; None for all.
        headings: print the headings.
        narrow: put one space between columns instead of two.
    """
    drawn = RichTable(
        box=None,
        pad_edge=False,
        collapse_padding=narrow,
        show_header=headings,
        title=Text(table.caption) if table.caption else None,
        title_justify="left",
        title_style="",
    )
    for heading, number_ in zip(table.headings, table.numeric, strict=True):
        whole = wrapped is not None and heading not in wrapped
        drawn.add_column(Text(heading), justify="right" if number_ else "left", no_wrap=whole, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    return drawn


def table_console() -> Console:
    """Return a console on standard output that is wide enough for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def markdown(table: Table) -> str:
    """Return the table as Markdown, without its caption."""
    rule = ["---:" if number_ else "---" for number_ in table.numeric]
    rows = [[cell.text.replace("|", "\\|") for cell in row] for row in table.rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [table.headings, rule, *rows])


def csv_row(cells: Iterable[Cell]) -> list[Any]:
    """Return a row for `csv.writer`: the cells' values, or their texts if they have no value."""
    return [cell.text if cell.value is None else cell.value for cell in cells]


def number(value: float | int | None, digits: int = 5) -> Cell:
    """Return a number as a cell; None, infinity and NaN sort last.

    >>> number(1234.5678).text, number(None).text, number(float("nan")).text
    ('1,234.6', '', 'nan')
    """
    if value is None:
        return Cell()
    if not math.isfinite(value):
        return Cell(str(value))
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}g}"
    return Cell(f"{value:,.0f}" if "e" in text and 1e4 <= abs(value) < 1e15 else text, value)


def size(count: int | None) -> Cell:
    """Return bytes as a cell."""
    return Cell() if count is None else Cell(format_bytes(int(count)), count)


def duration(seconds: float | None) -> Cell:
    """Return a duration in seconds as a cell, such as ``2 h 1 min``."""
    return Cell() if seconds is None else Cell(format_duration(seconds), seconds)


def percent(share: float | None, mark: str = "") -> Cell:
    """Return a relative change in percent as a cell; the text starts with ``mark``.

    >>> percent(-0.25).text, percent(0.04, "~ ").text
    ('-25%', '~ +4%')
    """
    return Cell() if share is None else Cell(f"{mark}{share:+.0%}", share)
