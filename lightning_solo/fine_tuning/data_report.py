"""The report on data before training: rows, tokens, and one row token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.errors import listed
from lightning_solo.tables import Cell, Table, number

if TYPE_CHECKING:
    from lightning_solo.fine_tuning.conversations import Encoded

PLACES = 3
"""Number of dropped rows that the report names for each reason."""
ON_TERMINAL = 60
"""Number of tokens of the shown row on the terminal."""
NAMES = 10
"""Number of names of columns and labels in a line."""
TOO_LONG = "too long"
"""Reason of dropped rows with too many tokens."""
MANY = 0.1
"""Share of such rows above which a warning is given."""


@dataclass
class DataReport:
    """Counts of rows and tokens, and the tokens of one row."""

    max_length: int = 0  # largest number of tokens of a row that is kept
    longest: int = 0  # tokens of the longest row that was read
    read: int = 0  # rows that were read; each is kept or dropped
    kept: int = 0  # rows that are used
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> number of rows
    places: dict[str, list[str]] = field(default_factory=dict)  # reason -> places of the first such rows
    unused: Counter[str] = field(default_factory=Counter)  # column that isn't used -> number of rows with it
    repeated: int = 0  # kept rows that are equal to an earlier one
    tokens: int = 0  # tokens of the kept rows
    train: int = 0  # rows to train on
    validation: int = 0  # rows to validate on
    # (token, id, whether it is trained) of the first row
    shown: list[tuple[str, int, bool]] = field(default_factory=list)

    def drop(self, reason: str, place: str) -> None:
        """Count a row that was read and isn't kept."""
        self.read += 1
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(place)

    def show(self, tokenizer: Any, ids: Tensor, labels: Tensor) -> None:
        """Store the tokens of a row; those with a label are trained."""
        trained = labels.ne(IGNORED).tolist() if labels.shape == ids.shape else [False] * len(ids)
        texts = [tokenizer.decode([id_], clean_up_tokenization_spaces=False) for id_ in ids.tolist()]
        self.shown = list(zip(texts, ids.tolist(), trained, strict=True))

    def nothing(self, path: str) -> str:
        """Return the message for a file of which no row is kept."""
        if not self.read:
            return f"{path}: no rows; write one JSON object a line, or the path of another file"
        reasons = "; ".join(f"{reason}: {count:,} ({self._named(reason)})" for reason, count in self.dropped.items())
        longer = f", or {self._longer()}" if TOO_LONG in self.dropped else ""
        return f"{path}: none of {self.read:,} rows is left: {reasons}; write other rows{longer}"

    def warning(self) -> str | None:
        """Return a warning if many rows are too long."""
        count = self.dropped[TOO_LONG]
        if count <= MANY * self.read:
            return None
        return (
            f"{count:,} of {self.read:,} rows are dropped, since they have more than"
            f" data.max_length={self.max_length} tokens; write {self._longer()}"
        )

    def _longer(self) -> str:
        return f"data.max_length={self.longest} for the longest row, or data.too_long=cut"

    def tables(self, tokens: int | None = ON_TERMINAL) -> Iterator[Table]:
        """Yield a table of counts, and one of a row's tokens, of which at most ``tokens`` are shown."""
        yield Table("data", ("what", "value"), list(self.counts()))
        shown = self.shown[:tokens]
        rows = [
            (Cell(str(n), n), Cell(repr(text)[1:-1], style="bold" if on else "dim"), Cell(str(id_), id_), _mark(on))
            for n, (text, id_, on) in enumerate(shown)
        ]
        left = len(self.shown) - len(shown)
        caption = "the first row, token by token" + (f", without its last {left:,}" if left else "")
        yield Table(caption, ("position", "token", "id", "trained"), rows)

    def counts(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield the lines of the first table."""
        yield Cell("rows read"), number(self.read)
        yield Cell("rows kept"), number(self.kept)
        for reason, count in self.dropped.items():
            yield Cell(f"dropped: {reason}"), Cell(f"{count:,} ({self._named(reason)})")
        if self.unused:
            yield Cell("columns that aren't used"), Cell(_counted(self.unused))
        if self.repeated:
            yield Cell("rows equal to an earlier one"), number(self.repeated)
        yield Cell("rows to train on"), number(self.train)
        yield Cell("rows to validate on"), number(self.validation)
        yield Cell("tokens"), number(self.tokens)

    def _named(self, reason: str) -> str:
        places = self.places[reason]
        return listed(places, PLACES) + (", ..." if self.dropped[reason] > len(places) else "")


@dataclass
class ChatReport(DataReport):
    """Counts of conversations too."""

    trained: int = 0  # tokens of the kept rows that are trained
    cut: int = 0  # kept rows of which only the first tokens are left
    answers: int = 0  # answers in the kept rows, before rows were cut
    ends: int = 0  # answers whose end-of-turn token is trained
    prefixes: int = 0  # answers that begin where the template ends the prompt for them
    # role other than the assistant's -> rows in which the template's tags train such a message
    others: Counter[str] = field(default_factory=Counter)

    def keep(self, row: Encoded) -> None:
        """Count a row that is kept, of which ``ids`` are left."""
        self.tokens += len(row.ids)
        self.trained += sum(row.trained)
        self.answers += row.answers
        self.ends += sum(place < len(row.ids) for place in row.ends)
        self.prefixes += row.answers * row.prefixes
        self.others.update(row.others)

    def warning(self) -> str | None:
        """Return a warning of rows that are too long, and of trained messages that are no answers."""
        roles = _counted(self.others)
        trained = (
            f"the chat template's generation tags are around messages that are no answers, so these are trained too,"
            f" in rows: {roles}; write data.chat_template=<a file with tags around answers alone, or without tags>"
        )
        return "; ".join(filter(None, [super().warning(), trained if self.others else None])) or None

    def counts(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield the lines of the first table."""
        yield from super().counts()
        yield Cell("tokens trained"), Cell(f"{self.trained:,} ({self.trained / self.tokens:.1%})")
        yield Cell(f"rows cut to {self.max_length:,} tokens"), number(self.cut)
        yield Cell("answers whose end-of-turn token is trained"), Cell(f"{self.ends:,} of {self.answers:,}")
        yield Cell("answers that begin where the prompt for them ends"), Cell(f"{self.prefixes:,} of {self.answers:,}")
        for role, count in self.others.items():
            yield Cell(f"rows with a trained message of the role {role}"), number(count)


@dataclass
class TextReport(DataReport):
    """Counts of documents; the rows to train on are windows of their text."""

    changed: Counter[str] = field(default_factory=Counter)  # rule -> number of kept documents that it changed

    def counts(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield the lines of the first table."""
        yield from super().counts()
        for rule, count in self.changed.items():
            yield Cell(f"changed: {rule}"), number(count)


@dataclass
class LabelReport(DataReport):
    """Counts of labels too.

    Attributes:
        labels: name -> number of rows or words with this label, in the order of their first occurrence.
    """

    labels: Counter[str] = field(default_factory=Counter)

    def counts(self) -> Iterator[tuple[Cell, Cell]]:
        """Yield the lines of the first table."""
        yield from super().counts()
        if self.labels:
            yield Cell("labels"), Cell(_counted(self.labels))


def _counted(names: Counter[str]) -> str:
    """Return the most frequent names with their counts."""
    return listed([f"{name} ({count:,})" for name, count in names.most_common()], NAMES)


def _mark(on: bool) -> Cell:
    return Cell("yes" if on else "", style="green" if on else "")
