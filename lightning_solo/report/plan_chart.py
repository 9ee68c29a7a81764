"""The picture of plans: the peak of each preset by category, as stacked bars, and a rule at the budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.errors import PresetError
from lightning_solo.planner.answer import Plan
from lightning_solo.report.charts import stacks
from lightning_solo.report.model import Cell, Figure, Table, number
from lightning_solo.report.pictures import png
from lightning_solo.report.write import write_whole
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
"""What a device's memory is needed for, in the order in which it is stacked, and a sign that needs no colour."""
FAR = 3  # times the greatest need
OVERHEAD = "overhead: the CUDA context, cuBLAS' workspace, the allocator's rounding and gaps"


def parts(plan: Plan) -> dict[str, int]:
    """Return the bytes of each category of ``CATEGORIES``; they sum up to what is needed of the device."""
    found = dict.fromkeys(CATEGORIES, 0)
    for name, size in plan.breakdown.items():
        category = name.replace("_", " ")
        found[category if category in found else "overhead"] += size
    found["overhead"] += plan.needed_bytes - plan.peak_bytes
    return found


def length(plans: Sequence[Plan]) -> int:
    """Return the bytes that the longest bar stands for; a budget far beyond all of them would leave dots of them."""
    most = max(plan.needed_bytes for plan in plans)
    budget = plans[0].budget_bytes
    return max(most, budget) if budget <= FAR * most else most


def picture(plans: Sequence[Plan]) -> Figure:
    """Return the chart of plans, in their order."""
    unit, size = ("GiB", GiB) if max(plan.needed_bytes for plan in plans) >= GiB else ("MiB", MiB)
    first = plans[0]
    title = f"Memory at the peak: {first.device}, {format_bytes(first.budget_bytes)}, micro-batch {first.micro_batch}"
    rows: list[dict[str, Any]] = [
        {
            "name": plan.preset,
            "parts": {name: count / size for name, count in parts(plan).items()},
            "label": f"{format_bytes(plan.needed_bytes)}, {plan.verdict}",
        }
        for plan in plans
    ]
    budget = f"budget {format_bytes(first.budget_bytes)}"
    seen = first.budget_bytes <= length(plans)
    mark = (first.budget_bytes / size, budget) if seen else None
    told = [f"{row['name']} {row['label']}" for row in rows]
    return Figure(
        name="plan",
        title=title,
        caption=f"Planned, not measured. {OVERHEAD.capitalize()}.",
        alternative=f"Stacked bars: {title}, in {unit}, by category. {budget.capitalize()}. {'; '.join(told)}.",
        draw=partial(stacks, rows, CATEGORIES, unit, mark),
        table=Table(
            f"{title}: data",
            ("preset", *CATEGORIES),
            [(Cell(row["name"], row["name"]), *(number(value) for value in row["parts"].values())) for row in rows],
        ),
    )


def write_picture(plans: Sequence[Plan], path: Path) -> None:
    """Write the chart as a PNG file.

    Raises:
        CapabilityError: Altair or vl-convert is not installed.
        PresetError: the file can't be written.
    """
    drawn = png(picture(plans))
    try:
        write_whole(path, drawn)
    except OSError as error:
        raise PresetError(f"--picture {path}: can't be written: {error.strerror}") from error
