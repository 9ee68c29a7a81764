"""The report on the folder of one run: loss, memory, step time, throughput, configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_solo.atomic_files import read_json
from lightning_solo.errors import CheckpointError
from lightning_solo.machine import VERSIONS, versions
from lightning_solo.memory.events import CATEGORIES, PHASES
from lightning_solo.planner.plan import MEASURED, PLANNED
from lightning_solo.report.csv_files import read_memory, read_metrics
from lightning_solo.report.figures import line_figure, stacked_figure, summary
from lightning_solo.report.model import Figure, Report, plain
from lightning_solo.report.series import Series
from lightning_solo.report.step_times import of_metrics, of_tensorboard, source_of
from lightning_solo.tables import Cell, Table, number
from lightning_solo.units import GiB, MiB

PLACES = ("csv", ".", "*", "*/*")
"""Folders below a run's to which loggers write; `lightning_logs/version_0` matches the last."""
CONFIGS = ("config.yaml", ".hydra/config.yaml", "csv/hparams.yaml", "hparams.yaml")
MOST_TEXT = 200_000
T = TypeVar("T")


def newest(folder: Path, name: str, places: Sequence[str] = PLACES) -> Path | None:
    """Return the newest file of a name in the first place that has one."""
    for place in places:
        paths = [path for path in folder.glob(f"{place}/{name}" if place != "." else name) if path.is_file()]
        if paths:
            return max(paths, key=lambda path: path.stat().st_mtime)
    return None


def read_run(folder: Path, places: Sequence[str] = PLACES) -> Report:
    """Return the report on a run's folder, with a note on each file that can't be read."""
    report = Report(title=plain(folder.resolve().name))
    metrics = _part(report, folder, "metrics.csv", places, read_metrics) or {}
    memory = _part(report, folder, "memory.csv", places, read_memory) or memory_of(metrics)
    events = newest(folder, "events.out.tfevents.*", ("tensorboard", *places))
    times = of_metrics(metrics)
    if not times and events is not None:
        times = _noted(report, of_tensorboard, events.parent) or []
    report.figures.extend(figure for figure in figures(metrics, memory, times) if figure is not None)
    if receipt := receipt_of(metrics):
        report.tables.append(receipt)
    if metrics:
        report.tables.append(summary("All logged metrics", metrics.values()))
    report.documents.update(documents(folder, CONFIGS))
    if report.figures:
        of_run = read_json(folder / VERSIONS)
        names = ", ".join(f"{plain(name)} {plain(str(version))}" for name, version in (of_run or versions()).items())
        report.facts["Versions"] = names if of_run else f"{names} (installed where this report was written)"
    return report


def figures(metrics: dict[str, Series], memory: Sequence[Series], times: Sequence[Series]) -> list[Figure | None]:
    """Return the charts of a run; None for a chart without data."""
    losses = [one for name, one in metrics.items() if "loss" in name.lower()]
    rates = [metrics[name] for name in ("throughput/tokens_per_s", "throughput/samples_per_s") if name in metrics]
    by_category = [one for category in CATEGORIES for one in memory if one.name == f"{category}_bytes"]
    by_phase = [one for phase in PHASES for one in memory if one.name == f"{phase}_bytes"]
    known = {one.name for one in (*by_category, *by_phase)}
    whole = [one for one in memory if one.name.endswith("_bytes") and one.name not in known]
    whole = [one for one in whole if any(one.values)]  # mostly nothing is swapped out
    return [
        line_figure("loss", "Loss", "loss", losses, "As logged."),
        memory_figure("memory", "Memory over time", whole, "Bytes of device and process; peaks are since a reset."),
        memory_figure("memory_by_category", "Memory by category", by_category, "Live storages, as the ledger counted."),
        memory_figure(
            "memory_by_phase", "Memory by phase", by_phase, "The most that was held in each phase of a step."
        ),
        line_figure("step_time", "Step time", "seconds per step", times, source_of(times)),
        line_figure("throughput", "Throughput", "per second", rates[:1], "As the throughput callback logged it."),
    ]


def memory_figure(name: str, title: str, series: Sequence[Series], caption: str) -> Figure | None:
    """Return a chart of bytes, in GiB, or in MiB if all are below 1 GiB; categories are stacked."""
    series = [one for one in series if one.values]
    if not series:
        return None
    unit, size = ("GiB", GiB) if max(max(one.values) for one in series) >= GiB else ("MiB", MiB)
    scaled = [
        Series(words(one.name), one.steps, [value / size for value in one.values], one.part, one.left_out)
        for one in series
    ]
    kind = stacked_figure if name == "memory_by_category" and {one.part for one in series} == {0} else line_figure
    return kind(name, title, unit, scaled, caption)


def words(column: str) -> str:
    """Return a column's name in words.

    >>> words("peak_allocated_bytes")
    'peak allocated'
    """
    return column.removesuffix("_bytes").replace("_", " ")


def memory_of(metrics: dict[str, Series]) -> list[Series]:
    """Return memory in bytes from metrics in GiB, for a run without `memory.csv`."""
    memory = []
    for name, one in metrics.items():
        if name.startswith("memory/") and name.endswith("_gib"):
            column = name.removeprefix("memory/").removesuffix("_gib")
            column = next((phase for phase in PHASES if column.startswith(f"{phase}_")), column)
            memory.append(Series(f"{column}_bytes", one.steps, [value * GiB for value in one.values]))
    return memory


def receipt_of(metrics: Mapping[str, Series]) -> Table | None:
    """Return the figures that a plan predicted and the run measured; None if no plan was checked."""
    rows = []
    for name, one in metrics.items():
        planned = metrics.get(name.replace(MEASURED, PLANNED, 1))
        if name.startswith(MEASURED) and planned is not None and one.values and planned.values:
            first, second = planned.values[-1], one.values[-1]
            what = words(name.removeprefix(MEASURED))
            rows.append((Cell(what, what), number(first), number(second), number(second / first)))
    header = ("figure", "planned", "measured", "measured / planned")
    return Table("Plan and measurement", header, rows) if rows else None


def documents(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the first of these text files that exists, without Hydra's own section."""
    for name in names:
        path = folder / name
        if path.is_file():
            text = path.read_bytes()[: MOST_TEXT + 1].decode("utf-8", errors="replace")
            cut = f"\n... cut here, at {MOST_TEXT:,} bytes" if len(text) > MOST_TEXT else ""
            return {f"Configuration ({name})": without_section(text[:MOST_TEXT], "hydra") + cut}
    return {}


def without_section(text: str, key: str) -> str:
    r"""Return YAML without one top-level section.

    >>> without_section("a: 1\nhydra:\n  b: 2\nc: 3\n", "hydra")
    'a: 1\nc: 3\n'
    """
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if line[:1] not in (" ", "-", "\n", "#", ""):
            inside = line.startswith(f"{key}:")
        if not inside:
            kept.append(line)
    return "".join(kept)


def _part(report: Report, folder: Path, name: str, places: Sequence[str], read: Callable[[Path], T]) -> T | None:
    path = newest(folder, name, places)
    return None if path is None else _noted(report, read, path)


def _noted(report: Report, read: Callable[[Path], T], path: Path) -> T | None:
    try:
        return read(path)
    except CheckpointError as error:
        report.notes.append(plain(error))
        return None
