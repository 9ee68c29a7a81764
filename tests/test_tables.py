"""A column is defined once: its cells are the same on the terminal, in Markdown and in CSV."""

from __future__ import annotations

import io

from rich.console import Console

from lightning_solo.tables import Cell, Column, csv_row, filled_table, markdown, number, percent, size, terminal
from lightning_solo.units import GiB

COLUMNS: tuple[Column[tuple[str, int | None]], ...] = (
    Column("name", lambda row: Cell(row[0])),
    Column("bytes", lambda row: size(row[1])),
    Column("loss", lambda _: number(None)),
)
ROWS = [("a [red]name", 3 * GiB), ("b|c", None)]


def printed(width: int, *wrapped: str) -> list[str]:
    said = io.StringIO()
    Console(file=said, width=width).print(terminal(filled_table("title", COLUMNS, ROWS), wrapped))
    return [line.rstrip() for line in said.getvalue().splitlines()]


def test_terminal_has_no_markup_and_aligns_numbers_to_the_right() -> None:
    title, *lines = printed(40)
    assert title == "title"
    assert len({line.index(end) + len(end) for line, end in zip(lines, ("bytes", "GiB"), strict=False)}) == 1
    assert lines[1].startswith("a [red]name ")


def test_only_the_named_columns_take_several_lines() -> None:
    assert [line for line in printed(16, "name") if "3.00 GiB" in line]
    assert not [line for line in printed(16, "bytes") if "3.00 GiB" in line]


def test_markdown_escapes_bars_and_leaves_out_empty_columns() -> None:
    assert markdown(filled_table("", COLUMNS, ROWS)).splitlines() == [
        "| name | bytes |", "| --- | ---: |", "| a [red]name | 3.00 GiB |", "| b\\|c |  |",
    ]  # fmt: skip


def test_csv_holds_values() -> None:
    assert csv_row([Cell("a"), size(3 * GiB), number(None), percent(0.5, "~ ")]) == ["a", 3 * GiB, "", 0.5]


def test_a_number_that_is_not_finite_has_no_value() -> None:
    assert [number(value).value for value in (1.5, float("inf"), float("nan"))] == [1.5, None, None]
