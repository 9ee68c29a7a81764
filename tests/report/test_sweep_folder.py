"""What is told of a sweep: every job, which of them are on the front, and where each wrote."""

from __future__ import annotations

import math
import random
import zlib
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.atomic_files import write_json
from lightning_solo.report.charts import scatter
from lightning_solo.report.palette import LIGHT
from lightning_solo.report.sweep_folder import MOST_CURVES, columns, front_of, job_folder, read_sweep
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.outcome import BEGUN
from lightning_solo.sweeps.results import Row, line_of
from lightning_solo.tables import Table
from lightning_solo.units import GiB
from tests.messages import lines_with
from tests.report.folders import HOSTILE, make_row, make_sweep, write_csv


def column(table: Table, heading: str) -> list[str]:
    return [row[list(table.headings).index(heading)].text for row in table.rows]


def test_all_jobs_are_in_the_table_failed_ones_too(tmp_path: Path) -> None:
    failed = make_row(2, status="crashed", detail=HOSTILE, returned=None, metrics={}, peak_device_bytes=None)
    report = read_sweep(make_sweep(tmp_path / "s", [make_row(0), make_row(1), failed]))
    (table,) = report.tables
    assert column(table, "job") == ["#0", "#1", "#2"]
    assert column(table, "status") == ["finished", "finished", "crashed"]
    assert column(table, "overrides") == ["optimizer.lr=0", "optimizer.lr=1", "optimizer.lr=2"]
    assert column(table, "peak device") == ["1.00 GiB", "2.00 GiB", ""]
    assert "model.width=8" in report.facts.values()
    assert report.facts["Jobs"] == "3: 2 finished, 1 crashed"
    assert report.facts["Hardware"] == "a GPU"
    assert report.documents["Configuration (multirun.yaml)"] == "model:\n  width: 8\n"


def test_the_front_is_marked(tmp_path: Path) -> None:
    rows = [make_row(0), make_row(1), make_row(2, returned=4.5, peak_device_bytes=3 * GiB, seconds=9.0)]
    report = read_sweep(make_sweep(tmp_path, rows))
    memory, time, curves = report.figures
    assert (memory.name, time.name, curves.name) == ("pareto_memory", "pareto_time", "loss_curves")
    on_front = {row["job"] for row in memory.draw(LIGHT)["datasets"]["data"] if row["front"]}
    assert on_front == {"#0", "#1"}  # 5.0 at 1 GiB, 4.0 at 2 GiB; 4.5 at 3 GiB is worse than #1 in both
    assert {row["job"] for row in time.draw(LIGHT)["datasets"]["data"] if row["front"]} == {"#1", "#2"}
    assert column(report.tables[0], "Pareto front") == ["loss/memory", "loss/memory, loss/time", "loss/time"]
    points = next(layer for layer in memory.draw(LIGHT)["layer"] if layer["mark"]["type"] == "point")["encoding"]
    assert points["shape"]["scale"]["range"] == ["diamond", "circle"]  # not by colour alone
    assert "#0, optimizer.lr=0: loss 5; #1" in memory.alternative


def test_front_has_the_jobs_that_no_other_beats() -> None:
    draw = random.Random(0)
    points = [(float(draw.randrange(9)), float(draw.randrange(9))) for _ in range(60)]  # some are equal
    rows = [make_row(n, returned=loss, seconds=seconds) for n, (loss, seconds) in enumerate(points)]
    for first in (3, 10, 60):
        among = points[:first]
        left = [p for p in among if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in among)]
        assert [(row.loss, row.seconds) for row in front_of(rows[:first], "seconds")] == left


def test_jobs_without_a_finite_loss_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [make_row(0), make_row(1, returned=math.nan), make_row(2, returned=-math.inf), make_row(3, seconds=None)]
    memory, time, _ = read_sweep(make_sweep(tmp_path, rows)).figures
    assert "2 of 4 jobs" in memory.caption
    assert "3 of 4 jobs" in time.caption


def test_a_pruned_job_is_left_out_where_jobs_are_compared(tmp_path: Path) -> None:
    rows = [make_row(0, returned=4.0), make_row(1, returned=5.0, seconds=1.0, detail="pruned at 50")]
    report = read_sweep(make_sweep(tmp_path, rows))
    assert [f.draw(LIGHT)["datasets"]["data"][0]["job"] for f in report.figures[:2]] == ["#0", "#0"]
    assert "1 of 2 jobs" in report.figures[1].caption
    assert column(report.tables[0], "Pareto front") == ["loss/memory, loss/time", ""]
    assert {row["series"][:2] for row in report.figures[2].draw(LIGHT)["datasets"]["data"]} == {"#0", "#1"}


def test_curves_are_of_the_same_loss(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, [make_row(n) for n in range(3)])
    many, few = range(10), [2.0, *[""] * 8, 1.0]
    logged = [{"train_loss": few, "val_loss": many}, {"train_loss": many, "val_loss": few}, {"val_loss": many}]
    for number, losses in enumerate(logged):
        write_csv(sweep / str(number) / "csv" / "metrics.csv", {"step": many, **losses})
    curves = read_sweep(sweep).figures[2]
    assert curves.caption == "val_loss, as logged."  # which all have
    assert {row["series"][:2] for row in curves.draw(LIGHT)["datasets"]["data"]} == {"#0", "#1", "#2"}
    write_csv(sweep / "2" / "csv" / "metrics.csv", {"step": many, "train_loss": many})
    assert read_sweep(sweep).figures[2].caption == "train_loss, as logged."  # which all have too
    write_csv(sweep / "0" / "csv" / "metrics.csv", {"step": many, "loss": many})
    curves = read_sweep(sweep).figures[2]
    assert lines_with(curves.caption, "train_loss", "1 of 3 jobs")


def test_legend_shortens_names_and_has_fewer_columns_for_long_ones(tmp_path: Path) -> None:
    def legend(*rows: Row) -> dict[str, Any]:
        spec = read_sweep(make_sweep(tmp_path / str(len(list(tmp_path.iterdir()))), rows)).figures[2].draw(LIGHT)
        encoding = spec["layer"][0]["encoding"]["color"]
        return {**encoding["legend"], "names": encoding["scale"]["domain"]}

    drawn = "optimizer.lr=0.0008311303692128172"
    short = legend(make_row(0, overrides=[drawn]), make_row(1))
    assert (short["columns"], short["names"]) == (3, ["#1 width=8 lr=1", "#0 lr=0.0008311"])
    long = legend(make_row(0, overrides=[drawn, "model.width=8", "data.width=8", "model.dropout=0.1"]), make_row(1))
    assert long["columns"] == 2
    assert long["names"][1] == "#0 lr=0.0008311 width=8 dropout=0.1"


def test_without_a_device_the_process_is_compared(tmp_path: Path) -> None:
    rows = [make_row(n, peak_device_bytes=None) for n in range(2)]
    memory = read_sweep(make_sweep(tmp_path, rows)).figures[0]
    assert lines_with(memory.table.headings[2], "process", "GiB")


def test_column_of_the_loss_is_headed_by_the_name_of_the_metric(tmp_path: Path) -> None:
    named, other = {"val/loss": 2.0, "test/loss": 1.0}, {"loss": 2.0}
    heads = {
        "val/loss": [make_row(0, returned=None, metrics=named), make_row(1, status="failed", metrics=other)],
        "loss": [make_row(0, returned=None, metrics=named), make_row(1, returned=3.0, metrics=named)],
    }
    for head, rows in heads.items():
        assert columns(rows)["loss"].heading == head


def test_running_job_has_a_row(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, [make_row(0)])
    files = SweepFolder(sweep).job(1)
    write_json(files.start, {"attempt": 1, "overrides": ["model.width=8", "optimizer.lr=9"], "folder": "x/1"})
    write_json(files.progress, {"step": 3, "metrics": {"train/loss": 2.5}})
    write_json(SweepFolder(sweep).job(0).start, {"attempt": 1, "overrides": []})  # of which there is a row
    (table,) = read_sweep(sweep).tables
    assert column(table, "status") == ["finished", BEGUN]
    assert column(table, "loss") == ["5", ""]  # which is of the last batch
    (sweep / "results.jsonl").unlink()
    assert column(read_sweep(sweep).tables[0], "job") == ["#0", "#1"]


def test_torn_line_is_left_out_and_other_version_is_a_note(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, [make_row(0), make_row(1)])
    lines = (sweep / "results.jsonl").read_bytes()
    (sweep / "results.jsonl").write_bytes(lines[:-30])
    assert column(read_sweep(sweep).tables[0], "job") == ["#0"]
    text = line_of(make_row(0)).split(b" ", 1)[1].replace(b'"version": 1', b'"version": 99').strip()
    (sweep / "results.jsonl").write_bytes(f"{zlib.crc32(text):08x} ".encode() + text + b"\n")
    report = read_sweep(sweep)
    assert report.has_content is False
    assert "version 99" in report.notes[0]
    (sweep / "results.jsonl").write_bytes(f"{zlib.crc32(b'[]'):08x} []\n".encode())  # whole, and no row
    assert "b'[]'; remove" in read_sweep(sweep).notes[0]


def test_only_the_best_of_many_curves_are_drawn(tmp_path: Path) -> None:
    curves = read_sweep(make_sweep(tmp_path, [make_row(n) for n in range(MOST_CURVES + 5)])).figures[2]
    domain = {row["series"] for row in curves.draw(LIGHT)["datasets"]["data"]}
    assert len(domain) == MOST_CURVES
    assert "#0 lr=0" not in domain  # its loss is the highest
    assert f"The {MOST_CURVES} jobs of least loss" in curves.caption


@pytest.mark.parametrize("said", ["runs/s/7", "/gone/s/7", "7", "", "../7"])
def test_job_folder_is_found_in_a_moved_sweep(tmp_path: Path, said: str) -> None:
    (tmp_path / "7").mkdir()
    assert job_folder(tmp_path, make_row(7, folder=said)) == tmp_path / "7"


def test_job_folder_with_parent_parts_is_not_resolved_in_the_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    sweep.mkdir()
    (tmp_path / "other").mkdir()
    assert job_folder(sweep, make_row(0, folder="x/../other")) == Path("x/../other")


def test_axes_of_a_single_point_have_a_domain() -> None:
    """Vega rounds those of a scale without extent: a loss of 0.6 stood at 1."""
    row = {"x": 0.3, "y": 0.6, "job": "#0", "overrides": "", "front": True}
    for rows, given in (([row], True), ([row, {**row, "x": 0.5, "y": 0.7}], False)):
        encoding = scatter(rows, "memory", "loss", LIGHT)["layer"][0]["encoding"]
        for axis in ("x", "y"):
            scale = encoding[axis]["scale"]
            assert ("domain" in scale) is given
            if given:
                assert scale["domain"][0] < row[axis] < scale["domain"][1]
