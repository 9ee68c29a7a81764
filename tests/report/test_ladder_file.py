"""The ladder's bars, and files that are no ladder."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_solo.report.ladder_file import read_ladder
from lightning_solo.report.palette import LIGHT
from lightning_solo.units import GiB
from tests.report.folders import HOSTILE, ladder_row, make_ladder


def test_bars_in_the_ladders_order_with_the_change(tmp_path: Path) -> None:
    report = read_ladder(make_ladder(tmp_path, ladder_row("checkpointing", 2 * GiB, 0.1)))
    memory, time = report.figures
    bars = memory.draw(LIGHT)["datasets"]
    assert [(row["name"], row["label"]) for row in bars["data"]] == [
        ("baseline", "8.00 GiB"),
        ("checkpointing", "4.00 GiB (-50%)"),
        (HOSTILE, "out of device memory"),
        ("checkpointing (2)", "2.00 GiB (-75%)"),
    ]
    assert bars["before"] == [{"end": 8.0}]
    assert [row["label"] for row in time.draw(LIGHT)["datasets"]["data"]][:2] == ["200 ms", "250 ms (+25%)"]
    assert (report.facts["Ladder"], report.facts["Ladder's hardware"]) == ("ladder x", "a GPU")
    cells = [cell.text for cell in report.tables[0].rows[1]]
    assert cells[2:6] == ["4096 MiB", "-50%", "250 ms", "+25%"]
    assert "noise" not in time.caption


def test_bars_are_of_the_counted_bytes_where_they_were_counted(tmp_path: Path) -> None:
    report = read_ladder(make_ladder(tmp_path, ladder_row("a", 2 * GiB, 0.1, counted_bytes=GiB)))
    labels = [row["label"] for row in report.figures[0].draw(LIGHT)["datasets"]["data"]]
    assert labels == ["finished", "finished", "out of device memory", "1.00 GiB"]
    assert [cell.text for cell in report.tables[0].rows[3]][2:5] == ["1024 MiB", "2048 MiB", "-75%"]


def test_counted_bytes_are_stacked_by_category_where_all_are_known(tmp_path: Path) -> None:
    sizes = {"weights": 1, "gradients": 2, "optimizer_states": 3, "activations": 4, "temporaries": 5, "other": 0}
    row = ladder_row("a", 2 * GiB, 0.1, counted_bytes=15, breakdown=sizes)
    report = read_ladder(make_ladder(tmp_path, row))
    drawn = report.figures[0].draw(LIGHT)["datasets"]["data"]
    parts = {each["part"]: round(each["size"] * 2**20) for each in drawn if each["name"] == "a"}
    assert parts == {"W weights": 1, "G gradients": 2, "O optimizer states": 3, "A activations": 4, "T temporaries": 5}
    without = ladder_row("b", 2 * GiB, 0.1, counted_bytes=15, breakdown={"weights": "many"})
    report = read_ladder(make_ladder(tmp_path, row, without))
    assert "part" not in report.figures[0].draw(LIGHT)["datasets"]["data"][0]


def test_a_change_within_the_noise_is_marked(tmp_path: Path) -> None:
    noisy = ladder_row("a", 2 * GiB, 0.25, step_quartiles_s=[0.2, 0.3], step_within_noise=True)
    odd = ladder_row("b", 2 * GiB, 0.25, step_quartiles_s=[0.2, None], step_within_noise="no")
    report = read_ladder(make_ladder(tmp_path, noisy, odd))
    memory, time = report.figures
    assert [row["label"] for row in time.draw(LIGHT)["datasets"]["data"]][3:] == [
        "250 ms (~ +25%)",
        "250 ms (+25%)",
    ]
    assert "~" not in "".join(row["label"] for row in memory.draw(LIGHT)["datasets"]["data"])
    assert "~:" in time.caption
    assert "~:" not in memory.caption
    assert [[cell.text for cell in row][4:6] for row in report.tables[0].rows[3:]] == [
        ["250 ms ±20%", "~ +25%"],  # (0.3 - 0.2) / 2 / 0.25
        ["250 ms", "+25%"],
    ]


def test_a_ladder_without_its_baseline_has_no_changes(tmp_path: Path) -> None:
    path = make_ladder(tmp_path) / "ladder.json"
    path.write_text(path.read_text().replace('"baseline": "baseline"', '"baseline": "gone"'))
    spec = read_ladder(tmp_path).figures[0].draw(LIGHT)
    assert [row["label"] for row in spec["datasets"]["data"]][1] == "4.00 GiB"
    assert "before" not in spec["datasets"]


def test_ladder_without_rows_has_an_empty_report(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text('{"rows": []}')
    report = read_ladder(tmp_path)
    assert (report.has_content, report.notes) == (False, [])


def test_numbers_that_are_not_finite_are_missing(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text('{"rows": [{"name": "a", "peak_bytes": NaN, "step_s": 1, "loss": Infinity}]}')
    report = read_ladder(tmp_path)
    assert [figure.name for figure in report.figures] == ["ladder_time"]
    assert report.notes == []


@pytest.mark.parametrize(
    "text",
    ["", '{"rows": [{"na', "[]", '{"rows": {}}', '{"rows": [1]}', '{"rows": [{"name": 1}]}',
     '{"rows": [{"name": "a", "peak_bytes": "much"}]}', '{"rows": [{"name": "a", "loss": true}]}', "[" * 100_000],
)  # fmt: skip
def test_invalid_ladder_is_a_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "ladder.json").write_text(text)
    report = read_ladder(tmp_path)
    assert not report.has_content
    assert "ladder.json" in report.notes[0]
    assert "lightning-solo ladder" in report.notes[0]
