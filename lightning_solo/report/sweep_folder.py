"""What the folder of a sweep tells: a table of its jobs, what loss cost in memory and time, their loss curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightning_solo.atomic_files import read_json
from lightning_solo.errors import CheckpointError
from lightning_solo.report.charts import scatter
from lightning_solo.report.csv_files import read_metrics
from lightning_solo.report.figures import line_figure
from lightning_solo.report.model import Cell, Figure, Report, Table, number, plain
from lightning_solo.report.run_folder import documents, newest
from lightning_solo.report.series import Series
from lightning_solo.sweeps import results
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.results import Row, pareto_front
from lightning_solo.units import GiB, format_bytes, shorter_numbers

BEGUN = "begun, no result yet"
MOST_CURVES = 35  # pairs of colour and dash that differ
MOST_DETAIL = 300


def is_sweep(folder: Path) -> bool:
    """Tell whether a sweep was run in a folder."""
    return (folder / "results.jsonl").is_file() or (folder / ".sweep").is_dir()


def read_sweep(folder: Path) -> Report:
    """Return what a sweep's folder tells; what can't be read is a note."""
    report = Report(title=plain(folder.resolve().name))
    try:
        rows = read_rows(folder)
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        told = str(error) if isinstance(error, CheckpointError) else f"{folder / 'results.jsonl'}: no results: {error}"
        report.notes.append(plain(told))
        return report
    if not rows:
        return report
    common = common_overrides(rows)
    report.facts.update(facts(rows, common))
    report.tables.append(jobs_table(rows, common))
    peak = peak_of(rows)
    x = f"peak memory of the {'device' if peak == 'peak_device_bytes' else 'process'}, GiB"
    drawn = [
        pareto_figure("pareto_memory", "Loss against peak memory", rows, common, peak, x),
        pareto_figure("pareto_time", "Loss against time", rows, common, "seconds", "seconds"),
        curves_figure(folder, rows, common, report.notes),
    ]  # fmt: skip
    report.figures.extend(figure for figure in drawn if figure is not None)
    report.documents.update(documents(folder, ("multirun.yaml",)))
    return report


def read_rows(folder: Path) -> list[Row]:
    """Return the results, and a row for each job that has begun and has none."""
    rows = results.read(folder / "results.jsonl")
    there = {row.number for row in rows}
    sweep = SweepFolder(folder)
    for job in sweep.jobs():
        start, progress = read_json(sweep.job(job).start), read_json(sweep.job(job).progress) or {}
        if job not in there and start is not None:
            begun = Row(
                job, tuple(start.get("overrides", ())), BEGUN, folder=str(start.get("folder", "")),
                metrics=progress.get("metrics") or {}, steps=progress.get("step"),
            )  # fmt: skip
            rows.append(begun)
    return rows


def facts(rows: Sequence[Row], common: Sequence[str]) -> dict[str, str]:
    """Return what holds for the sweep as a whole."""
    counts = Counter(row.status for row in rows)
    told = {
        "Jobs": f"{len(rows)}: {', '.join(f'{count} {status}' for status, count in counts.most_common())}",
        "The same in all jobs": " ".join(common),
        "Hardware": "; ".join(dict.fromkeys(row.hardware for row in rows if row.hardware)),
        "Versions": "; ".join(
            dict.fromkeys(", ".join(f"{n} {v}" for n, v in row.versions.items()) for row in rows if row.versions)
        ),
    }
    return {name: plain(value) for name, value in told.items() if value}


def common_overrides(rows: Sequence[Row]) -> list[str]:
    """Return the overrides that all jobs share, where there are several jobs."""
    if len(rows) < 2:
        return []
    return [text for text in rows[0].overrides if all(text in row.overrides for row in rows)]


def own(row: Row, common: Sequence[str]) -> str:
    """Return the overrides that tell a job from the others."""
    return plain(" ".join(str(text) for text in row.overrides if text not in common)) or "(no overrides of its own)"


def peak_of(rows: Sequence[Row]) -> str:
    """Return which peak the jobs are compared by: the device's, where any has one."""
    return "peak_device_bytes" if any(row.peak_device_bytes for row in rows) else "peak_host_bytes"


def jobs_table(rows: Sequence[Row], common: Sequence[str]) -> Table:
    """Return a row per job, failed ones too."""
    fronts = {
        "memory": {row.number for row in front_of(rows, peak_of(rows))},
        "time": {row.number for row in front_of(rows, "seconds")},
    }
    headings = ("job", "overrides", "status", "loss", "peak, device", "peak, process", "tokens/s", "seconds", "steps",
                "Pareto front", "detail")  # fmt: skip
    cells = []
    for row in rows:
        on = " and ".join(f"loss/{cost}" for cost, numbers in fronts.items() if row.number in numbers)
        detail = plain(row.detail)
        cells.append((
            Cell(f"#{row.number}", row.number),
            Cell(own(row, common), own(row, common)),
            Cell(plain(row.status), plain(row.status)),
            number(row.loss), size(row.peak_device_bytes), size(row.peak_host_bytes), number(row.tokens_per_s, 4),
            number(None if row.seconds is None else float(row.seconds), 4), number(row.steps),
            Cell(on or "–", on),
            Cell(detail if len(detail) <= MOST_DETAIL else f"{detail[:MOST_DETAIL]}…", detail[:MOST_DETAIL]),
        ))  # fmt: skip
    return Table("All jobs", headings, cells, sortable=True)


def size(count: int | None) -> Cell:
    """Return bytes as a cell."""
    return Cell("–") if count is None else Cell(format_bytes(count), count)


def pruned(row: Row) -> bool:
    """Tell whether a search has ended a job before its end: its loss and cost are those of a shorter run.

    >>> pruned(Row(0, (), "finished", detail="pruned at 50")), pruned(Row(0, (), "finished"))
    (True, False)
    """
    return "pruned at " in row.detail


def comparable(rows: Sequence[Row], cost: str) -> list[Row]:
    """Return the jobs that ran to their end, of which both loss and cost are known and finite."""
    both = [(row, row.loss, getattr(row, cost)) for row in rows if row.status == FINISHED and not pruned(row)]
    return [row for row, loss, paid in both if loss is not None and paid is not None and math.isfinite(loss + paid)]


def front_of(rows: Sequence[Row], cost: str) -> list[Row]:
    """Return the jobs than which no other has both less loss and less cost."""
    return pareto_front(comparable(rows, cost), ("loss", cost))


def pareto_figure(
    name: str, title: str, rows: Sequence[Row], common: Sequence[str], cost: str, x: str
) -> Figure | None:
    """Return a chart of loss against a cost, or None where no job tells both."""
    shown = comparable(rows, cost)
    if not shown:
        return None
    front = sorted(front_of(rows, cost), key=lambda row: getattr(row, cost))
    numbers = {row.number for row in front}
    scale = GiB if cost.endswith("_bytes") else 1
    points = [
        {"x": getattr(row, cost) / scale, "y": row.loss, "job": f"#{row.number}", "overrides": own(row, common),
         "front": row.number in numbers}
        for row in sorted(shown, key=lambda row: getattr(row, cost))
    ]  # fmt: skip
    cells = [
        (Cell(p["job"], int(p["job"][1:])), Cell(p["overrides"], p["overrides"]), number(p["x"]), number(p["y"]),
         Cell("yes" if p["front"] else "no", p["front"]))
        for p in points
    ]  # fmt: skip
    best = "; ".join(f"#{row.number}, {own(row, common)}: loss {number(row.loss).text}" for row in front[:10])
    left = f" {len(rows) - len(shown)} of {len(rows)} jobs were pruned, or tell no loss and cost, and are left out."
    return Figure(
        name=name,
        title=title,
        caption=f"Lower and further left is better; the front is marked by filled diamonds."
        f"{left if len(rows) > len(shown) else ''}",
        alternative=f"Scatter plot: {title}, {len(shown)} jobs. On the Pareto front, from cheap to dear: {best}.",
        draw=partial(scatter, points, x, "loss"),
        table=Table(f"{title}: data", ("job", "overrides", x, "loss", "on the front"), cells, sortable=True),
    )


def curves_figure(folder: Path, rows: Sequence[Row], common: Sequence[str], notes: list[str]) -> Figure | None:
    """Return the loss curves of the jobs, or None where none is logged."""
    ranked = sorted(rows, key=lambda row: row.loss if row.loss is not None and row.loss == row.loss else math.inf)
    logged: list[tuple[Row, dict[str, Series]]] = []
    for row in ranked:
        if len(logged) == MOST_CURVES:
            break
        path = newest(job_folder(folder, row), "metrics.csv")
        try:
            losses = losses_of(read_metrics(path)) if path is not None else {}
        except CheckpointError as error:
            notes.append(plain(error))
            continue
        if losses:
            logged.append((row, losses))
    compared = loss_name([losses for _, losses in logged])
    drawn, name = [(row, losses[compared]) for row, losses in logged if compared in losses], plain(compared[:60])
    curves = [Series(label(row, common), one.steps, one.values, left_out=one.left_out) for row, one in drawn]
    only = (
        f" The {MOST_CURVES} jobs of least loss; the table has all." if len(logged) == MOST_CURVES < len(rows) else ""
    )
    others = len(logged) - len(drawn)
    without = f" {others} of {len(logged)} jobs logged another one alone." if others else ""
    return line_figure("loss_curves", "Loss of each job", name, curves, f"{name}, as logged.{without}{only}")


def losses_of(metrics: dict[str, Series]) -> dict[str, Series]:
    """Return what is named a loss, by name."""
    return {name: one for name, one in metrics.items() if "loss" in name.lower() and one.values}


def loss_name(logged: Sequence[dict[str, Series]]) -> str:
    """Return the loss that curves are compared in: what most jobs logged; training's where there are several.

    The same one of all jobs, since a validation's is not to be compared with a training's.
    """
    jobs = Counter(name for losses in logged for name in losses)
    points = Counter(name for losses in logged for name, one in losses.items() for _ in one.values)
    return max(jobs, key=lambda name: (jobs[name], "val" not in name.lower(), points[name]), default="loss")


def label(row: Row, common: Sequence[str]) -> str:
    """Return what tells a job from the others in the little room of a legend.

    >>> label(Row(2, ("model.width=8", "optimizer.lr=0.000123456", "data.width=9"), "finished"), [])
    '#2 model.width=8 lr=0.0001235 data.width=9'
    """
    options = [text.partition("=") for text in own(row, common).split(" ")]
    last = [key.rpartition(".")[2] for key, _, _ in options]
    short = [
        f"{end if last.count(end) == 1 else key}{is_}{value}"
        for end, (key, is_, value) in zip(last, options, strict=True)
    ]
    return shorter_numbers(f"#{row.number} {' '.join(short)}")[:120]


def job_folder(folder: Path, row: Row) -> Path:
    """Return where a job wrote: inside the sweep as it lies now, else where it said, from the working directory."""
    parts = Path(row.folder).parts
    for start in range(len(parts)):
        inside = folder.joinpath(*parts[start:])
        if parts[start] != "/" and ".." not in parts[start:] and inside.is_dir():
            return inside
    return Path(row.folder) if row.folder else folder / str(row.number)
