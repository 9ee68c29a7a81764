"""The report on data before training: rows, tokens, and one row token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.errors import listed
from lightning_solo.tables import Cell, Table, number

if TYPE_CHECKING:
    from lightning_solo.fine_tuning.conversations import Encoded

PLACES = 3
"""Rows of each reason that the report names."""
ON_TERMINAL = 60
"""Tokens of the shown row on the terminal."""


@dataclass
class DataReport:
    """Counts of rows and tokens, and the tokens of one row.

    Attributes:
        read: rows that were read; each is kept or dropped.
        kept: rows that are used.
        dropped: reason -> number of rows.
        places: reason -> places of the first of these rows.
        tokens: tokens of the kept rows.
        trained: tokens of these that are trained.
        train: rows to train on.
        validation: rows to validate on.
        shown: (token, id, whether it is trained) of the first row.
    """

    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)
    tokens: int = 0
    trained: int = 0
    train: int = 0
    validation: int = 0
    shown: list[tuple[str, int, bool]] = field(default_factory=list)

    def drop(self, reason: str, place: str) -> None:
        """Count a row that isn't kept."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(place)

    def show(self, tokenizer: Any, rows: Any) -> None:
        """Take the tokens of the first row."""
        first = rows[0]
        ids, on = first["input_ids"].tolist(), first["labels"].ne(IGNORED).tolist()
        texts = [tokenizer.decode([id_], clean_up_tokenization_spaces=False) for id_ in ids]
        self.shown = list(zip(texts, ids, on, strict=True))

    def nothing(self, path: str) -> str:
        """Return the message for a file of which no row is kept."""
        if not self.read:
            return f"{path}: no rows; write one JSON object a line, or the path of another file"
        reasons = "; ".join(f"{reason}: {count:,} ({self._named(reason)})" for reason, count in self.dropped.items())
        longer = ", such as a larger data.max_length, or data.too_long=cut" if "too long" in self.dropped else ""
        return f"{path}: none of {self.read:,} rows is left: {reasons}; write other rows or settings{longer}"

    def tables(self, tokens: int | None = ON_TERMINAL) -> Iterator[Table]:
        """Yield a table of counts, and one of a row's tokens, of which at most ``tokens`` are shown."""
        yield Table("data", ("what", "value"), list(self.counts()))
        shown = self.shown[:tokens]
        rows = [
            (Cell(str(n), n), Cell(repr(text)[1:-1], style="bold" if on else "dim"), Cell(str(id_), id_), _mark(on))
            for n, (text, id_, on) in enumerate(shown)
        ]
        left = len(self.shown) - len(shown)
        yield Table(
            "the first row, token by token" + (f", without its last {left:,}" if left else ""),
            ("position", "token", "id", "trained"),
            rows,
        )

    def counts(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield the lines of the first table."""
        yield Cell("rows read"), number(self.read)
        yield Cell("rows kept"), number(self.kept)
        for reason, count in self.dropped.items():
            yield Cell(f"dropped: {reason}"), Cell(f"{count:,} ({self._named(reason)})")
        yield Cell("rows to train on"), number(self.train)
        yield Cell("rows to validate on"), number(self.validation)
        yield Cell("tokens"), number(self.tokens)

    def _named(self, reason: str) -> str:
        places = self.places[reason]
        return listed(places, PLACES) + (", ..." if self.dropped[reason] > len(places) else "")


@dataclass
class ChatReport(DataReport):
    """Counts of conversations too.

    Attributes:
        max_length: most tokens of a row.
        cut: kept rows of which only the first tokens are left.
        answers: answers in the kept rows, before rows were cut.
        ends: answers whose end-of-turn token is trained.
        prefixes: answers that begin where the template ends the prompt for them.
    """

    max_length: int = 0
    cut: int = 0
    answers: int = 0
    ends: int = 0
    prefixes: int = 0

    def keep(self, row: Encoded) -> None:
        """Count a row that is kept, of which ``ids`` are left."""
        self.kept += 1
        self.answers += row.answers
        self.ends += sum(place < len(row.ids) for place in row.ends)
        self.prefixes += row.answers * row.prefixes

    def counts(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield the lines of the first table."""
        yield from super().counts()
        yield Cell("tokens trained"), Cell(f"{self.trained:,} ({self.trained / self.tokens:.1%})")
        yield Cell(f"rows cut to {self.max_length:,} tokens"), number(self.cut)
        yield Cell("answers whose end-of-turn token is trained"), Cell(f"{self.ends:,} of {self.answers:,}")
        yield Cell("answers that begin where the prompt for them ends"), Cell(f"{self.prefixes:,} of {self.answers:,}")


@dataclass
class TextReport(DataReport):
    """Counts of documents; the rows to train on are windows of their text.

    Attributes:
        changed: rule -> number of kept documents that it changed.
    """

    changed: dict[str, int] = field(default_factory=dict)

    def counts(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield the lines of the first table."""
        yield from super().counts()
        for rule, count in self.changed.items():
            yield Cell(f"changed: {rule}"), number(count)


def _mark(on: bool) -> Cell:
    return Cell("yes" if on else "", style="green" if on else "")
