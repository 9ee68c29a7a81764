"""Charts of plans: the peak of each preset by category, and the times of computing and copying in a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import write_whole
from lightning_solo.errors import PresetError
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.timeline import COMPUTE, STREAMS, busy
from lightning_solo.report.charts import spans, stacks
from lightning_solo.report.model import Figure
from lightning_solo.report.pictures import png
from lightning_solo.tables import Cell, Table, number
from lightning_solo.units import GiB, MiB, format_bytes

CATEGORIES = {
    "weights": "W",
    "gradients": "G",
    "optimizer states": "O",
    "activations": "A",
    "temporaries": "T",
    "other": "X",
    "overhead": "-",
}
"""Use of a device's memory, in stacking order -> a sign that needs no colour."""
FAR = 3
"""A budget above this multiple of the greatest need is not drawn."""
OVERHEAD = "overhead: the CUDA context, cuBLAS' workspace, the allocator's rounding and gaps"


def parts(plan: Plan) -> dict[str, int]:
    """Return the bytes of each category of ``CATEGORIES``; they sum up to the needed device memory."""
    sizes = dict.fromkeys(CATEGORIES, 0)
    for name, size in plan.breakdown.items():
        category = name.replace("_", " ")
        sizes[category if category in sizes else "overhead"] += size
    sizes["overhead"] += plan.needed_bytes - plan.peak_bytes
    return sizes


def length(plans: Sequence[Plan]) -> int:
    """Return the bytes at the full width: the largest need, or a higher budget of at most `FAR` times that."""
    most = max(plan.needed_bytes for plan in plans)
    budget = plans[0].budget_bytes
    return max(most, budget) if budget <= FAR * most else most


def picture(plans: Sequence[Plan]) -> Figure:
    """Return the chart of plans, in their order."""
    unit, size = ("GiB", GiB) if max(plan.needed_bytes for plan in plans) >= GiB else ("MiB", MiB)
    first = plans[0]
    title = f"Memory at the peak: {first.device}, {format_bytes(first.budget_bytes)}, micro-batch {first.micro_batch}"
    shares = [{name: count / size for name, count in parts(plan).items()} for plan in plans]
    labels = [f"{format_bytes(plan.needed_bytes)}, {plan.verdict}" for plan in plans]
    rows = [
        {"name": plan.preset, "parts": share, "label": label}
        for plan, share, label in zip(plans, shares, labels, strict=True)
    ]
    budget = f"budget {format_bytes(first.budget_bytes)}"
    mark = (first.budget_bytes / size, budget) if first.budget_bytes <= length(plans) else None
    values = [f"{plan.preset} {label}" for plan, label in zip(plans, labels, strict=True)]
    return Figure(
        name="plan",
        title=title,
        caption=f"Planned, not measured. {OVERHEAD.capitalize()}.",
        alternative=f"Stacked bars: {title}, in {unit}, by category. {budget.capitalize()}. {'; '.join(values)}.",
        draw=partial(stacks, rows, CATEGORIES, unit, mark),
        table=Table(
            f"{title}: data",
            ("preset", *CATEGORIES),
            [(Cell(plan.preset), *map(number, share.values())) for plan, share in zip(plans, shares, strict=True)],
        ),
    )


def timelines(plans: Sequence[Plan]) -> Figure | None:
    """Return the chart of the presets that copy while they compute; None if no preset does."""
    streamed = [plan for plan in plans if plan.timeline]
    if not streamed:
        return None
    rows: list[dict[str, Any]] = [
        {
            "lane": f"{plan.preset}, {span.stream}",
            "begin": 1e3 * span.start_s,
            "end": 1e3 * span.end_s,
            "part": "copies" if span.stream != COMPUTE else span.name.replace("_", " "),
            "share": span.share,
        }
        for plan in streamed
        for span in sorted(plan.timeline, key=lambda span: STREAMS.index(span.stream))
    ]
    title = f"One optimizer step on its streams: {plans[0].device}, micro-batch {plans[0].micro_batch}"
    times = [
        f"{plan.preset}: " + ", ".join(f"{stream} {1e3 * busy(plan.timeline, stream):.3g} ms" for stream in STREAMS)
        for plan in streamed
    ]
    cells = [
        (Cell(row["lane"]), Cell(row["part"]), *(number(row[name]) for name in ("begin", "end", "share")))
        for row in rows
    ]
    return Figure(
        name="plan-timeline",
        title=title,
        caption="Planned, not measured: at most two micro-batches of a step. The paler, the more a stream waits.",
        alternative=f"Bars over time: {title}, in milliseconds. {'; '.join(times)}.",
        draw=partial(spans, rows, "milliseconds"),
        table=Table(f"{title}: data", ("lane", "what", "from ms", "to ms", "busy"), cells),
    )


def write_pictures(plans: Sequence[Plan], path: Path) -> list[Path]:
    """Write the charts as PNG files and return their paths: the peaks, and the timelines if there are any.

    Raises:
        CapabilityError: Altair or vl-convert is not installed.
        PresetError: a file can't be written.
    """
    drawn = {path: png(picture(plans))}
    if (figure := timelines(plans)) is not None:
        drawn[path.with_stem(f"{path.stem}-timeline")] = png(figure)
    for file, content in drawn.items():
        try:
            write_whole(file, content)
        except OSError as error:
            raise PresetError(f"--picture {file}: can't be written: {error.strerror}") from error
    return list(drawn)
