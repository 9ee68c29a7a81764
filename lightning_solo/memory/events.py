"""A ledger's log: the bytes and category of each storage when it is allocated, resized and freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PHASES = ("forward", "backward", "optimizer_step")
CATEGORIES = ("weights", "gradients", "optimizer_states", "activations", "temporaries", "other")


@dataclass(frozen=True)
class Peak:
    """The most bytes that were live at once.

    Args:
        bytes: at the peak.
        breakdown: bytes of each category of ``CATEGORIES``; they sum up to ``bytes``.
        operator: name of the operator that allocated the last bytes of the peak, such as ``aten.mm.default``; empty
            before the first operator.
        module: qualified name of the module whose forward or backward ran the operator; empty for the root and outside.
    """

    bytes: int
    breakdown: dict[str, int]
    operator: str = ""
    module: str = ""


@dataclass
class EventLog:
    """Allocations, resizes and frees of storages, in order; a storage is the index of its label."""

    events: list[tuple[int, int]] = field(default_factory=list)  # (storage, bytes gained or lost), in order
    labels: list[str] = field(default_factory=list)  # storage -> its last category
    held: dict[int, int] = field(default_factory=dict)  # storage -> bytes before the first event
    # storages of ``held`` that another stream allocated, whose memory only that stream reuses
    aside: frozenset[int] = frozenset()

    def born(self, label: str) -> int:
        """Add a storage, and return its index."""
        self.labels.append(label)
        return len(self.labels) - 1

    def peak(self, first: int = 0, last: int | None = None) -> tuple[int, int]:
        """Return the peak bytes over ``events[first:last]``, and the number of events before the peak.

        >>> EventLog([(0, 4), (1, 8), (1, -8), (2, 2)]).peak()
        (12, 2)
        """
        now = sum(self.held.values()) + sum(change for _, change in self.events[:first])
        most, where = now, first
        for index, (_, change) in enumerate(self.events[first:last], first + 1):
            now += change
            if now > most:
                most, where = now, index
        return most, where

    def breakdown(self, count: int) -> dict[str, int]:
        """Return the bytes of each category after the first ``count`` events."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for storage, held in self.held.items():
            totals[self.labels[storage]] += held
        for storage, change in self.events[:count]:
            totals[self.labels[storage]] += change
        return totals

    def forget(self, living: Sequence[tuple[int, int]]) -> None:
        """Drop all events; ``living`` has the bytes of each storage that exists before the next event."""
        self.events.clear()
        self.held = dict(living)
