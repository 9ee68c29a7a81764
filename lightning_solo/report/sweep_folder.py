"""The report on a sweep's folder: a table of its jobs, loss against memory and time, loss curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from lightning_solo.errors import CheckpointError
from lightning_solo.report.charts import scatter
from lightning_solo.report.csv_files import read_metrics
from lightning_solo.report.figures import line_figure
from lightning_solo.report.model import Figure, Report, plain
from lightning_solo.report.run_folder import documents, newest
from lightning_solo.report.series import Series
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.results import Row, gpu_cell, read_all
from lightning_solo.tables import Cell, Column, Table, duration, filled_table, number, size
from lightning_solo.units import GiB, shorter_numbers

MOST_CURVES = 35  # pairs of colour and dash that differ
MOST_DETAIL = 300


def is_sweep(folder: Path) -> bool:
    """Return whether a sweep was run in a folder."""
    return (folder / "results.jsonl").is_file() or (folder / ".sweep").is_dir()


def read_sweep(folder: Path) -> Report:
    """Return the report on a sweep's folder, with a note on each file that can't be read."""
    report = Report(title=plain(folder.resolve().name))
    try:
        rows = read_all(SweepFolder(folder))
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        known = isinstance(error, CheckpointError)
        report.notes.append(plain(error if known else f"{folder / 'results.jsonl'}: no results: {error}"))
        return report
    if not rows:
        return report
    common = common_overrides(rows)
    report.facts.update(facts(rows, common))
    report.tables.append(filled_table("All jobs", columns(rows).values(), rows, sortable=True))
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


def facts(rows: Sequence[Row], common: Sequence[str]) -> dict[str, str]:
    """Return the facts about the sweep as a whole."""
    counts = Counter(row.status for row in rows)
    texts = {
        "Jobs": f"{len(rows)}: {', '.join(f'{count} {status}' for status, count in counts.most_common())}",
        "The same in all jobs": " ".join(common),
        "Hardware": "; ".join(dict.fromkeys(row.hardware for row in rows if row.hardware)),
        "Versions": "; ".join(
            dict.fromkeys(", ".join(f"{n} {v}" for n, v in row.versions.items()) for row in rows if row.versions)
        ),
    }
    return {name: plain(value) for name, value in texts.items() if value}


def common_overrides(rows: Sequence[Row]) -> list[str]:
    """Return the overrides that all jobs share; none for a single job."""
    if len(rows) < 2:
        return []
    return [text for text in rows[0].overrides if all(text in row.overrides for row in rows)]


def own_overrides(row: Row, common: Sequence[str]) -> list[str]:
    """Return a job's overrides that some other job doesn't have."""
    return [str(text) for text in row.overrides if text not in common]


def own(row: Row, common: Sequence[str]) -> str:
    """Return a job's own overrides as text."""
    return plain(" ".join(own_overrides(row, common))) or "(no overrides of its own)"


def peak_of(rows: Sequence[Row]) -> str:
    """Return the name of the peak that jobs are compared by: the device's, if any job has one."""
    return "peak_device_bytes" if any(row.peak_device_bytes for row in rows) else "peak_host_bytes"


def columns(rows: Sequence[Row]) -> dict[str, Column[Row]]:
    """Return the columns of a table of jobs by name, as in `--sort` and in the head of a CSV."""
    common, fronts = common_overrides(rows), fronts_of(rows)

    def overrides(row: Row) -> Cell:
        return Cell(plain(shorter_numbers(" ".join(own_overrides(row, common)))), plain(" ".join(row.overrides)))

    def detail(row: Row) -> Cell:
        whole = plain(row.detail)
        return Cell(whole if len(whole) <= MOST_DETAIL else f"{whole[:MOST_DETAIL]}…", whole)

    return {
        "job": Column("job", lambda row: Cell(f"#{row.number}", row.number)),
        "overrides": Column("overrides", overrides),
        "status": Column("status", lambda row: Cell(plain(row.detail if pruned(row) else row.status), row.status)),
        "loss": Column(head_of_loss(rows), lambda row: number(row.loss, 4)),
        "peak_device_bytes": Column("peak device", lambda row: size(row.peak_device_bytes)),
        "peak_host_bytes": Column("peak host", lambda row: size(row.peak_host_bytes)),
        "tokens_per_s": Column("tokens per s", lambda row: number(row.tokens_per_s, 4)),
        "seconds": Column("time", lambda row: duration(row.seconds)),
        "gpu": Column("GPU", lambda row: gpu_cell(row.gpu)),
        "steps": Column("steps", lambda row: number(row.steps)),
        "attempt": Column("attempt", lambda row: number(row.attempt)),
        "detail": Column("detail", detail),
        "best": Column("Pareto front", lambda row: Cell(", ".join(f"loss/{cost}" for cost in fronts[row.number]))),
    }


def head_of_loss(rows: Sequence[Row]) -> str:
    """Return the name of the metric that is the loss of all jobs; "loss" if they differ or return a number."""
    names = {row.loss_name for row in rows if row.loss is not None}
    return plain(names.pop() or "loss") if len(names) == 1 else "loss"


def pruned(row: Row) -> bool:
    """Return whether a search pruned a job, which means that loss and cost are those of a shorter run.

    >>> pruned(Row(0, (), "finished", detail="pruned at 50")), pruned(Row(0, (), "finished"))
    (True, False)
    """
    return "pruned at " in row.detail


def comparable(rows: Sequence[Row], cost: str) -> list[Row]:
    """Return the jobs that were not pruned and have a finite loss and cost."""
    both = [(row, row.loss, getattr(row, cost)) for row in rows if not pruned(row)]
    return [row for row, loss, paid in both if loss is not None and paid is not None and math.isfinite(loss + paid)]


def front_of(rows: Sequence[Row], cost: str) -> list[Row]:
    """Return the Pareto front: the jobs for which no other job is as good in loss and cost, and better in one."""
    jobs, point = comparable(rows, cost), attrgetter("loss", cost)
    front, least = set(), math.inf
    for loss, paid in sorted(set(map(point, jobs))):
        if paid < least:
            front.add((loss, paid))
            least = paid
    return [job for job in jobs if point(job) in front]


def fronts_of(rows: Sequence[Row]) -> dict[int, list[str]]:
    """Return number of a job -> the costs, of memory and time, whose Pareto front with the loss contains the job."""
    fronts = {"memory": front_of(rows, peak_of(rows)), "time": front_of(rows, "seconds")}
    on = {cost: {row.number for row in front} for cost, front in fronts.items()}
    return {row.number: [cost for cost, numbers in on.items() if row.number in numbers] for row in rows}


def pareto_figure(
    name: str, title: str, rows: Sequence[Row], common: Sequence[str], cost: str, x: str
) -> Figure | None:
    """Return a chart of loss against a cost, or None if no job has both."""
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
    left = f" {len(rows) - len(shown)} of {len(rows)} jobs were pruned or lack loss or cost, and are left out."
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
    """Return the loss curves of the jobs, or None if no job logged one."""
    ranked = sorted(rows, key=lambda row: row.loss if row.loss is not None and row.loss == row.loss else math.inf)
    logged: list[tuple[Row, dict[str, Series]]] = []
    for row in ranked:
        if len(logged) == MOST_CURVES:
            break
        path = newest(job_folder(folder, row), "metrics.csv")
        try:
            metrics = read_metrics(path) if path is not None else {}
        except CheckpointError as error:
            notes.append(plain(error))
            continue
        losses = {name: one for name, one in metrics.items() if "loss" in name.lower() and one.values}
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


def loss_name(logged: Sequence[dict[str, Series]]) -> str:
    """Return the loss that most jobs logged, preferably a training loss.

    It is drawn for all jobs, since validation and training losses don't compare.
    """
    jobs = Counter(name for losses in logged for name in losses)
    points = Counter(name for losses in logged for name, one in losses.items() for _ in one.values)
    return max(jobs, key=lambda name: (jobs[name], "val" not in name.lower(), points[name]), default="loss")


def label(row: Row, common: Sequence[str]) -> str:
    """Return a job's number and own overrides, shortened for a legend.

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
    """Return the folder of a job: inside the sweep's folder, which may have moved, else the row's path."""
    parts = Path(row.folder).parts
    for start in range(len(parts)):
        inside = folder.joinpath(*parts[start:])
        if parts[start] != "/" and ".." not in parts[start:] and inside.is_dir():
            return inside
    return Path(row.folder) if row.folder else folder / str(row.number)
