"""What took longest in a trace, by module and by technique, and how long the device waited for the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]

from lightning_solo.tables import Cell, Column, Table, filled_table
from lightning_solo.techniques.profile.labels import MODULE, RECOMPUTED, TECHNIQUE, WITHIN
from lightning_solo.units import format_seconds

OPTIMIZER = "Optimizer."  # torch's own ranges, such as Optimizer.step#AdamW.step
REST = "the rest: loss, data, Lightning"
OTHERS = {RECOMPUTED: "recomputed modules", OPTIMIZER: "optimizer", WITHIN: REST, "": REST}
"""Kind -> its row in the table of techniques."""
MOST = 10  # rows of a table
Row = tuple[str, dict[str, float]]
Where = tuple[str, str, str]
"""Kind (a beginning in `labels`, or ``OPTIMIZER``; empty elsewhere), name, and ``forward`` or ``backward``."""


@dataclass
class Breakdown:
    """Seconds of a trace by where they were spent; those of inner ranges don't count in outer ones."""

    host: dict[Where, float] = field(default_factory=dict)  # where -> the host's seconds
    device: dict[Where, float] = field(default_factory=dict)  # where -> the device's seconds; empty without a device
    # share of the time from the device's first work to its last in which it had none; None without a device
    idle: float | None = None

    @classmethod
    def of(cls, events: Sequence[Any]) -> Breakdown:
        """Return the breakdown of ``torch.profiler.profile.events()``."""
        breakdown, on_host = cls(), [event for event in events if event.device_type == DeviceType.CPU]
        breakdown.idle = idle_share(
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type != DeviceType.CPU and not event.is_user_annotation
        )
        # autograd numbers operators in forward, and gives their numbers to the nodes of backward
        forward: dict[tuple[int, int], str] = {}
        for event in on_host:
            if event.sequence_nr >= 0 and not event.fwd_thread:
                kind, name, _ = _where(event, {})
                if kind in (MODULE, RECOMPUTED):
                    forward.setdefault((event.thread, event.sequence_nr), name)
        for event in on_host:
            where = _where(event, forward)
            for seconds, micros in (
                (breakdown.host, event.self_cpu_time_total),
                (breakdown.device, event.self_device_time_total),
            ):
                if micros > 0:
                    seconds[where] = seconds.get(where, 0.0) + micros / 1e6
        return breakdown

    def tables(self) -> list[Table]:
        """Return the tables of modules and of techniques, whose shares sum up to 1 with the rows that are left out."""
        modules: dict[str, dict[str, float]] = {}
        techniques: dict[str, dict[str, float]] = {}
        for clock, counts in (("host", self.host), ("device", self.device)):
            for (kind, name, phase), seconds in counts.items():
                if kind == MODULE:
                    if clock == self._clock:
                        modules.setdefault(name, {})[phase] = seconds
                    continue
                row = techniques.setdefault(OTHERS.get(kind, name), {})
                row[clock] = row.get(clock, 0.0) + seconds
        of_modules: tuple[Column[Row], ...] = (
            Column("module", lambda row: Cell(row[0])),
            Column("forward", lambda row: _time(row[1].get("forward"))),
            Column("backward", lambda row: _time(row[1].get("backward"))),
            Column("share", lambda row: self._share(sum(row[1].values()))),
        )
        of_techniques: tuple[Column[Row], ...] = (
            Column("technique", lambda row: Cell(row[0])),
            Column("host", lambda row: _time(row[1].get("host"))),
            Column("device", lambda row: _time(row[1].get("device"))),
            Column("share", lambda row: self._share(row[1].get(self._clock, 0.0))),
        )
        rows = sorted(modules.items(), key=lambda row: -sum(row[1].values()))[:MOST]
        others = sorted(techniques.items(), key=lambda row: -row[1].get(self._clock, 0.0))[:MOST]
        tables = [
            filled_table(f"modules, without their parts ({self._clock})", of_modules, rows),
            filled_table("techniques and all else", of_techniques, others),
        ]
        return [table for table in tables if table.rows]

    @property
    def _clock(self) -> str:
        return "device" if self.device else "host"

    def _share(self, seconds: float) -> Cell:
        share = seconds / sum((self.device or self.host).values())
        return Cell(f"{share:.1%}", share)


def _time(seconds: float | None) -> Cell:
    return Cell(format_seconds(seconds), seconds) if seconds else Cell()


def _where(event: Any, forward: dict[tuple[int, int], str]) -> Where:
    """Return the innermost range around an event; for backward, the module whose forward made the node."""
    at = event
    while at is not None:
        for kind in (MODULE, RECOMPUTED, TECHNIQUE, WITHIN):
            if at.name.startswith(kind):
                return kind, at.name.removeprefix(kind), "backward" if kind == RECOMPUTED else "forward"
        if at.name.startswith(OPTIMIZER):
            return OPTIMIZER, at.name, ""
        if at.fwd_thread and (name := forward.get((at.fwd_thread, at.sequence_nr))):
            return MODULE, name, "backward"
        at = at.cpu_parent
    return "", "", ""


def idle_share(busy: Iterable[tuple[float, float]]) -> float | None:
    """Return the share of the time, from the first begin to the last end, that no interval covers; None without any.

    >>> idle_share([(0, 4), (2, 4), (7, 8)])
    0.375
    """
    ordered = sorted(busy)
    if not ordered:
        return None
    first, covered = ordered[0][0], 0.0
    until = first
    for begin, end in ordered:
        covered += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return 1 - covered / (until - first) if until > first else 0.0
