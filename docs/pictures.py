"""Charts of the documentation and of README, drawn from `examples/results/*.json`, for light and dark pages.

The documentation draws its own when it is built (directive `{chart}`); README's are files:

    python docs/pictures.py            # exit 1 if README's pictures differ
    python docs/pictures.py --write
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.planner.plan import Plan
from lightning_solo.report import ladder_file
from lightning_solo.report.charts import agreement, bars, lines, stacks
from lightning_solo.report.figures import in_words, points_table
from lightning_solo.report.model import Draw, Figure
from lightning_solo.report.page import vega_lite, vl_convert
from lightning_solo.report.palette import DARK, LIGHT, Palette
from lightning_solo.report.plan_chart import picture, timelines
from lightning_solo.report.series import Series
from lightning_solo.tables import Table
from lightning_solo.units import GiB, MiB

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "results"
FOLDER = ROOT / "docs" / "_static"
PALETTES = {"light": LIGHT, "dark": DARK}
WIDTH = 720
MARGIN = 28  # vl-convert measures labels by another font than the browser's
FIRST_STEPS = 200  # the fall of their losses would flatten all others
STATES = {"weights": "W", "gradients": "G", "optimizer states": "O"}
PARTS = {**STATES, "activations": "A", "temporaries": "T"}


def ladder(result: dict[str, Any]) -> list[Figure]:
    """Return memory and step time of each rung."""
    return ladder_file.figures(ladder_file.figures_of(result["rows"], result["baseline"]), result["baseline"])


def compact(result: dict[str, Any]) -> list[Figure]:
    """Return the model states of each preset, and its losses over steps."""
    rows = [
        {
            "name": row["preset"],
            "parts": {name: row[name.replace(" ", "_")] for name in STATES},
            "label": f"{row['in_all']:.2f}",
        }
        for row in result["states"]
    ]
    title = "Model states after a step: bytes per parameter"
    states = of_bars("bytes_per_parameter", title, rows, partial(stacks, rows, STATES, "bytes per parameter", None))
    return [states, losses(result["convergence"])]


def losses(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return the loss of each preset over steps, as the mean of its seeds."""
    curves: dict[str, list[list[float]]] = {}
    rows = [row for row in rows if "curve" in row]
    for row in rows:
        curves.setdefault(row["preset"], []).append(row["curve"])
    each, seeds = rows[0]["every"], len({row["seed"] for row in rows})
    series = []
    for preset, found in curves.items():
        points = [(each * (at + 1), statistics.mean(values)) for at, values in enumerate(zip(*found, strict=True))]
        series.append(Series(preset, *zip(*[point for point in points if point[0] > FIRST_STEPS], strict=True)))
    title = f"Training loss after step {FIRST_STEPS}"
    unit = f"loss, mean of {each} steps" + (f" and {seeds} seeds" if seeds > 1 else f", seed {rows[0]['seed']}")
    draw = partial(lines, series, "optimizer step", unit)
    return Figure("losses", title, "", in_words(title, unit, series), draw, points_table(title, unit, series))


def padding(result: dict[str, Any]) -> list[Figure]:
    """Return the share of padding by how batches are made, for the middle one of the distributions."""
    row = result["rows"][len(result["rows"]) // 2]
    ways = {
        "random batches": row["plain"],
        "similar lengths": row["by_count"],
        "similar lengths, by tokens": row["by_tokens"],
        "packed": row["packed"],
    }
    rows = [
        {"name": name, "value": 100 * share, "label": f"{share:.1%}", "first": name == "random batches"}
        for name, share in ways.items()
    ]
    title = f"Padding of log-normal lengths, sigma {row['sigma']}"
    return [of_bars("padding", title, rows, partial(bars, rows, "% of a batch's tokens"))]


def sequences(result: dict[str, Any]) -> list[Figure]:
    """Return the peak of a step by the length of the sequence."""
    lengths = [result["lengths"][0], *(2 * length for length in result["lengths"])]
    lengths = sorted(set(lengths))[: len(result["rows"][0]["steps"])]
    series = [
        Series(row["name"].replace("`", ""), lengths, [step["peak"] / MiB for step in row["steps"]])
        for row in result["rows"]
    ]
    title, unit = "Peak of a step by length of the sequence", "MiB"
    draw = partial(lines, series, "tokens", unit)
    return [Figure("sequences", title, "", in_words(title, unit, series), draw, points_table(title, unit, series))]


def plans(result: dict[str, Any]) -> list[Figure]:
    """Return the peak of each preset, and the schedule of a step of those that copy while they compute."""
    planned = [Plan.from_dict(plan) for plan in result["plans"]]
    return [figure for figure in (picture(planned), timelines(planned)) if figure is not None]


def architectures(result: dict[str, Any]) -> list[Figure]:
    """Return the planned peak of each architecture against the counted one; the plan that is furthest off is named."""
    counted = {name: row for name, row in result["architectures"].items() if "cpu" in row}
    off = {name: row["cpu"] / row["real"] - 1 for name, row in counted.items() if row["cpu"] != row["real"]}
    furthest = max(off, key=lambda name: abs(off[name]))
    rows = [
        {
            "name": name,
            "x": row["real"] / MiB,
            "y": row["cpu"] / MiB,
            "kind": "different" if name in off else "equal to the byte",
            "label": f"{name.split('/')[-1]}, {off[name]:+.0%}" if name == furthest else "",
        }
        for name, row in sorted(counted.items(), key=lambda item: item[0] in off)
    ]
    title = f"Planned and counted peaks of {len(rows)} architectures"
    words = f"{len(rows) - len(off)} are equal to the byte, {len(off)} differ, most {furthest} by {off[furthest]:+.0%}"
    return [of_points("architectures", title, words, rows, "counted in real steps, MiB", "planned, MiB")]


def step_times(result: dict[str, Any]) -> list[Figure]:
    """Return the planned time of each step against the real one, by the table's speeds and by calibrated ones."""
    speeds = {"table_s": "speeds of the table", "calibrated_s": "calibrated"}
    rows = [
        {
            "name": f"{row['module']}, {row['preset']}",
            "x": 1e3 * row["real_s"],
            "y": 1e3 * row[key],
            "kind": kind,
            "label": "",
        }
        for key, kind in speeds.items()
        for row in result["rows"]
    ]
    ratios = {
        kind: statistics.median(row["y"] / row["x"] for row in rows if row["kind"] == kind) for kind in speeds.values()
    }
    words = ", ".join(f"{kind}: median {ratio:.2f} of the real time" for kind, ratio in ratios.items())
    return [of_points("step_times", "Planned and real step times", words, rows, "real, ms", "planned, ms")]


def rungs(result: dict[str, Any]) -> list[Figure]:
    """Return the parts of the planned peak, one technique after another."""
    rows = [
        {
            "name": row["name"],
            "parts": {name: row["breakdown"][name.replace(" ", "_")] / GiB for name in PARTS},
            "label": f"{row['peak_bytes'] / GiB:.1f} GiB",
        }
        for row in result["rungs"]
    ]
    title = "Planned peak, each technique added to those above it"
    return [of_bars("rungs", title, rows, partial(stacks, rows, PARTS, "GiB", None))]


def budgets(result: dict[str, Any]) -> list[Figure]:
    """Return the peak of each model against its budget."""
    rows = [
        {
            "name": row["model"],
            "x": row["budget"] / MiB,
            "y": row["peak"] / MiB,
            "kind": row["model"].split(",")[0],
            "label": "",
        }
        for row in result["rows"]
    ]
    shares = [row["y"] / row["x"] for row in rows]
    words = f"{len(rows)} peaks of {min(shares):.2f} to {max(shares):.2f} of their budgets"
    return [of_points("budgets", "Peak of a step under a byte budget", words, rows, "budget, MiB", "peak, MiB")]


def of_points(name: str, title: str, words: str, rows: Sequence[dict[str, Any]], x: str, y: str) -> Figure:
    """Return a figure of points beside the line of equal values; the table is on the page."""
    draw = partial(agreement, rows, x, y)
    return Figure(name, title, "", f"Scatter chart: {title}. {words}.", draw, Table(title, (), []))


def of_bars(name: str, title: str, rows: Sequence[dict[str, Any]], draw: Draw) -> Figure:
    """Return a figure whose text names each bar's label; the table is on the page."""
    values = "; ".join(f"{row['name']}: {row['label']}" for row in rows)
    return Figure(name, title, "", f"Bar chart: {title}. {values}.", draw, Table(title, (), []))


CHARTS: dict[str, Callable[[dict[str, Any]], list[Figure]]] = {
    "ladder_cpu.json": ladder,
    "compact_cpu.json": compact,
    "padding_cpu.json": padding,
    "sequences_cpu.json": sequences,
    "activation_budget_cpu.json": budgets,
    "architectures_cpu.json": architectures,
    "plan_order_cpu.json": step_times,
    "whole_ladder.json": rungs,
    "plan_byte_gpt_1b.json": plans,
}


def figures(name: str) -> list[Figure]:
    """Return the charts of a file of results."""
    return CHARTS[name](json.loads((RESULTS / name).read_text(encoding="utf-8")))


def svg(figure: Figure, palette: Palette) -> str:
    """Return a chart with its title as SVG, on a transparent ground."""
    spec = {**figure.draw(palette), "width": WIDTH, "padding": {"left": MARGIN, "top": 5, "right": 5, "bottom": 5}}
    spec["title"] = {"text": figure.title, "color": palette.ink, "anchor": "start", "fontSize": 15}
    text = json.dumps(spec, allow_nan=False)
    return str(vl_convert().vegalite_to_svg(text, vl_version=vega_lite(), allowed_base_urls=[]))


def html(name: str) -> str:
    """Return the charts of a file of results, each for a light and for a dark page (furo's classes)."""
    return "\n".join(
        f'<div class="chart only-{ground}" role="img" aria-label="{figure.alternative}">{svg(figure, palette)}</div>'
        for figure in figures(name)
        for ground, palette in PALETTES.items()
    )


def files() -> dict[Path, str]:
    """Return README's pictures."""
    return {
        FOLDER / f"{figure.name}_{ground}.svg": svg(figure, palette)
        for figure in figures("ladder_cpu.json")
        for ground, palette in PALETTES.items()
    }


if __name__ == "__main__":
    differ = [path for path, text in files().items() if not path.is_file() or path.read_text("utf-8") != text]
    if "--write" in sys.argv:
        for path, text in files().items():
            path.write_text(text, encoding="utf-8")
    elif differ:
        names = ", ".join(path.name for path in differ)
        sys.exit(f"{names}: differ from examples/results; write: python docs/pictures.py --write")
