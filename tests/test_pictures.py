"""Charts of the documentation show the figures of their files, also in words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lightning_solo.units import GiB, MiB
from tests.pages import DOCS, load_file

PICTURES = load_file(DOCS / "pictures.py")


def result_of(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((PICTURES.RESULTS / name).read_text(encoding="utf-8"))
    return result


def drawn(figure: Any, data: str = "data") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = figure.draw(PICTURES.LIGHT)["datasets"][data]
    return rows


def test_each_chart_is_on_a_page_and_each_page_has_its_charts() -> None:
    shown = {
        name for page in DOCS.rglob("*.md") for name in re.findall(r"^```\{chart\} (\S+)$", page.read_text(), re.M)
    }
    assert shown == set(PICTURES.CHARTS)


@pytest.mark.parametrize("name", PICTURES.CHARTS)
def test_a_chart_is_drawn_for_both_grounds_and_told_in_words(name: str) -> None:
    page = PICTURES.html(name)
    for figure in PICTURES.figures(name):
        assert figure.title in figure.alternative
        assert re.search(r"\d", figure.alternative.replace(figure.title, ""))
        assert page.count(f'aria-label="{figure.alternative}"') == 2
        light, dark = (PICTURES.svg(figure, palette) for palette in PICTURES.PALETTES.values())
        assert figure.title in light
        assert light != dark
    assert page.count("only-light") == page.count("only-dark") == len(PICTURES.figures(name))


def test_losses_are_means_over_seeds_after_the_first_steps() -> None:
    curves = {"baseline": [[9.0, 4.0, 2.0], [9.0, 5.0, 3.0]], "compact": [[9.0, 4.5, 2.5], [9.0, 4.5, 2.0]]}
    rows = [
        {"preset": preset, "seed": seed, "every": 200, "curve": curve}
        for preset, seeds in curves.items()
        for seed, curve in enumerate(seeds)
    ]
    figure = PICTURES.losses(rows)
    points = [(row["series"], row["x"], row["y"]) for row in drawn(figure)]
    assert points == [("baseline", 400, 4.5), ("baseline", 600, 2.5), ("compact", 400, 4.5), ("compact", 600, 2.25)]
    assert "compact from 4.5 at step 400 to 2.25 at step 600" in figure.alternative


def test_plans_that_differ_from_counted_peaks_stand_out() -> None:
    peaks = {"text/one": (MiB, MiB), "text/off": (2 * MiB, 3 * MiB), "image/near": (100 * MiB, 99 * MiB)}
    found = {name: {"real": real, "cpu": planned} for name, (real, planned) in peaks.items()}
    (figure,) = PICTURES.architectures({"architectures": {**found, "text/none": {"counted": False}}})
    assert [(row["name"], row["x"], row["y"]) for row in drawn(figure)] == [
        ("text/one", 1, 1),
        ("text/off", 2, 3),
        ("image/near", 100, 99),
    ]
    assert [row["kind"] for row in drawn(figure)] == ["equal to the byte", "different", "different"]
    assert [row["label"] for row in drawn(figure)] == ["", "off, +50%", ""]
    for words in ("1 are equal", "2 differ", "text/off by +50%"):
        assert words in figure.alternative
    below, above = drawn(figure, "equal")
    assert below["x"] == below["y"] < 1
    assert above["x"] == above["y"] > 100


def test_every_counted_architecture_is_a_point() -> None:
    result = result_of("architectures_cpu.json")
    (figure,) = PICTURES.architectures(result)
    points = drawn(figure)
    assert len(points) == result["summary"]["traced"]
    assert sum(row["x"] == row["y"] for row in points) == result["summary"]["equal"]


def test_step_times_are_drawn_for_both_speeds() -> None:
    rows = [{"module": "m", "preset": "bf16", "real_s": 0.010, "table_s": 0.005, "calibrated_s": 0.020}]
    (figure,) = PICTURES.step_times({"rows": rows})
    assert [(row["kind"], row["x"], row["y"]) for row in drawn(figure)] == [
        ("speeds of the table", 10, 5),
        ("calibrated", 10, 20),
    ]
    assert "median 0.50" in figure.alternative


def test_peaks_under_a_budget_are_drawn_against_it() -> None:
    rows = [{"model": "GPT, 12 blocks", "budget": 4 * MiB, "peak": 3 * MiB}]
    (figure,) = PICTURES.budgets({"rows": [*rows, {"model": "LSTM", "budget": 2 * MiB, "peak": 2 * MiB}]})
    assert [(row["kind"], row["x"], row["y"]) for row in drawn(figure)] == [("GPT", 4, 3), ("LSTM", 2, 2)]
    assert "2 peaks of 0.75 to 1.00 of their budgets" in figure.alternative


def test_parts_of_each_rung_add_up_to_its_peak() -> None:
    result = result_of("whole_ladder.json")
    (figure,) = PICTURES.rungs(result)
    for rung in result["rungs"]:
        parts = sum(row["size"] for row in drawn(figure) if row["name"] == rung["name"])
        assert parts == pytest.approx(rung["peak_bytes"] / GiB, rel=0.1)
