"""Charts of the documentation and of README, drawn from `examples/results/*.json`, for light and dark pages.

The documentation draws its own when it is built (directive `{chart}`); README's are files:

    python docs/pictures.py            # exit 1 if README's pictures differ
    python docs/pictures.py --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.planner.plan import Plan
from lightning_solo.report import ladder_file
from lightning_solo.report.charts import against, bars, lines, stacks
from lightning_solo.report.figures import in_words, points_table
from lightning_solo.report.model import Draw, Figure
from lightning_solo.report.page import vega_lite, vl_convert
from lightning_solo.report.palette import DARK, LIGHT, Palette
from lightning_solo.report.plan_chart import picture, timelines
from lightning_solo.report.series import Series
from lightning_solo.tables import Table
from lightning_solo.units import MiB

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "results"
FOLDER = ROOT / "docs" / "_static"
PALETTES = {"light": LIGHT, "dark": DARK}
WIDTH = 720
MARGIN = 28  # vl-convert measures labels by another font than the browser's
STATES = {"weights": "W", "gradients": "G", "optimizer states": "O"}


def ladder(result: dict[str, Any]) -> list[Figure]:
    """Return memory and step time of each rung."""
    return ladder_file.figures(ladder_file.figures_of(result["rows"], result["baseline"]), result["baseline"])


def bytes_per_parameter(result: dict[str, Any]) -> list[Figure]:
    """Return the model states of each preset."""
    rows = [
        {
            "name": row["preset"],
            "parts": {name: row[name.replace(" ", "_")] for name in STATES},
            "label": f"{row['in_all']:.2f}",
        }
        for row in result["states"]
    ]
    title = "Model states after a step: bytes per parameter"
    return [of_bars("bytes_per_parameter", title, rows, partial(stacks, rows, STATES, "bytes per parameter", None))]


def planned_against_counted(result: dict[str, Any]) -> list[Figure]:
    """Return the planned and the counted peak of a step of each architecture."""
    rows = [
        {"name": name, "x": entry["real"] / MiB, "y": entry["cpu"] / MiB}
        for name, entry in result["architectures"].items()
        if entry.get("real") and entry.get("cpu")
    ]
    farthest = max(rows, key=lambda row: abs(row["y"] / row["x"] - 1))
    title = f"Peak of a step of {len(rows)} architectures of transformers"
    text = (
        f"Scatter chart: {title}, planned against counted, from {min(row['x'] for row in rows):.0f} to"
        f" {max(row['x'] for row in rows):.0f} MiB. Farthest apart: {farthest['name']}, planned"
        f" {farthest['y']:.1f} MiB, counted {farthest['x']:.1f} MiB."
    )
    draw = partial(against, rows, "counted in a real step, MiB", "planned, MiB")
    return [Figure("planned_against_counted", title, "", text, draw, Table(title, (), []))]


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


def of_bars(name: str, title: str, rows: Sequence[dict[str, Any]], draw: Draw) -> Figure:
    """Return a figure whose text names each bar's label; the table is on the page."""
    values = "; ".join(f"{row['name']}: {row['label']}" for row in rows)
    return Figure(name, title, "", f"Bar chart: {title}. {values}.", draw, Table(title, (), []))


CHARTS: dict[str, Callable[[dict[str, Any]], list[Figure]]] = {
    "ladder_cpu.json": ladder,
    "compact_cpu.json": bytes_per_parameter,
    "architectures_cpu.json": planned_against_counted,
    "padding_cpu.json": padding,
    "sequences_cpu.json": sequences,
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
