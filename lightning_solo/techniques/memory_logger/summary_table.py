"""The table at the end of a run: mean and largest bytes of each reading."""

from __future__ import annotations

from rich.console import Console

from lightning_solo.tables import Cell, Table, size, terminal


class SummaryTable:
    """Byte counts by name, in the order of first appearance."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, name: str, count: int) -> None:
        """Add one count of bytes."""
        self._counts.setdefault(name, []).append(count)

    def largest(self, name: str) -> int:
        """Return the largest count of a name; 0 for an unknown name."""
        return max(self._counts.get(name, [0]))

    def rows(self) -> dict[str, tuple[int, int]]:
        """Return the mean, rounded down, and the largest count, by name."""
        return {name: (sum(counts) // len(counts), max(counts)) for name, counts in self._counts.items()}

    def print(self, title: str, below: str = "") -> None:
        """Print the table, and a line below it."""
        rows = [(Cell(name.replace("_", " ")), *map(size, counts)) for name, counts in self.rows().items()]
        console = Console()
        console.print(terminal(Table(title, ("", "mean", "largest"), rows)))
        if below:
            console.print(below, soft_wrap=True, markup=False)
