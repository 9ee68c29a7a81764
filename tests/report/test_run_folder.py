"""What is told of one run, and from which of its files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_solo import Throughput
from lightning_solo.errors import CheckpointError
from lightning_solo.memory.events import CATEGORIES
from lightning_solo.report.palette import DASHES, LIGHT
from lightning_solo.report.run_folder import read_run
from lightning_solo.report.step_times import of_tensorboard, records
from lightning_solo.units import MiB
from tests.report.folders import make_run, write_csv
from tests.training import fit


def test_a_run_has_its_charts_its_configuration_and_versions(tmp_path: Path) -> None:
    report = read_run(make_run(tmp_path / "first"))
    assert report.title == "first"
    assert [f.name for f in report.figures] == ["loss", "memory", "memory_by_category", "step_time", "throughput"]
    assert "width: 64" in report.documents["Configuration (config.yaml)"]
    assert "torch" in report.facts["Versions"]
    assert "this report" in report.facts["Versions"]
    assert report.notes == []
    (tmp_path / "first" / "versions.json").write_text('{"torch": "1.2.3"}')  # which `train` writes as a run starts
    assert read_run(tmp_path / "first").facts["Versions"] == "torch 1.2.3"


def test_text_and_chart_keep_the_spike_of_a_long_run(tmp_path: Path) -> None:
    loss = read_run(make_run(tmp_path, steps=20_000, spike=99.0)).figures[0]
    assert "greatest 99" in loss.alternative
    assert "Thinned from 20,010 points" in loss.caption  # 20,000 of training and 10 of validation
    drawn = [row["y"] for row in loss.draw(LIGHT)["datasets"]["data"]]
    assert max(drawn) == 99.0
    assert len(drawn) < 2000
    assert "99" in [row[2].text for row in loss.table.rows]


def test_categories_are_stacked_in_the_ledgers_order(tmp_path: Path) -> None:
    figure = next(f for f in read_run(make_run(tmp_path)).figures if f.name == "memory_by_category")
    spec = figure.draw(LIGHT)
    assert spec["mark"]["type"] == "area"
    assert spec["encoding"]["color"]["scale"]["domain"] == [name.replace("_", " ") for name in CATEGORIES]
    assert spec["encoding"]["y"]["title"] == "GiB"


def test_small_run_is_in_mib(tmp_path: Path) -> None:
    write_csv(tmp_path / "csv" / "memory.csv", {"step": [1, 2], "resident_bytes": [3 * MiB, 5 * MiB]})
    (figure,) = read_run(tmp_path).figures
    assert "in MiB" in figure.alternative
    assert "from 3 at step 1 to 5 at step 2" in figure.alternative


def test_memory_is_read_from_metrics_without_memory_csv(tmp_path: Path) -> None:
    columns = {"step": [1, 2], "memory/resident_gib": [1.0, 2.0], "memory/forward_resident_gib": [0.5, 1.5]}
    write_csv(tmp_path / "metrics.csv", columns)
    figures = {f.name: f for f in read_run(tmp_path).figures}
    assert set(figures) == {"memory", "memory_by_phase"}
    assert "resident from 1 at step 1 to 2 at step 2" in figures["memory"].alternative


def test_newest_version_of_lightnings_folder_is_read(tmp_path: Path) -> None:
    for version, loss in ((0, 7.0), (1, 8.0)):
        write_csv(tmp_path / "lightning_logs" / f"version_{version}" / "metrics.csv", {"step": [1], "loss": [loss]})
    assert "from 8 at step 1" in read_run(tmp_path).figures[0].alternative


def test_damaged_file_is_a_note(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "csv" / "memory.csv").write_text("a,b\n1,2\n")
    report = read_run(run)
    assert "memory.csv" in report.notes[0]
    assert [f.name for f in report.figures] == ["loss", "step_time", "throughput"]


def test_caption_counts_losses_that_are_not_finite(tmp_path: Path) -> None:
    write_csv(tmp_path / "metrics.csv", {"step": range(4), "loss": [3, "nan", "nan", "inf"]})
    assert "3 values" in read_run(tmp_path).figures[0].caption


def event_file(folder: Path, steps: int) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for step in range(0, steps, 10):
        writer.add_scalar("train/loss", 1.0, step, walltime=1000 + step * 0.25 + (60 if step >= 50 else 0))
    writer.close()
    return next(folder.glob("events.out.tfevents.*"))


def test_step_times_are_read_from_tensorboard(tmp_path: Path) -> None:
    path = event_file(tmp_path / "tensorboard", 100)
    (series,) = of_tensorboard(path.parent)
    assert series.steps == list(range(10, 100, 10))
    assert series.values == [0.25] * 4 + [6.25] + [0.25] * 4  # at step 50 something took a minute: (60 + 2.5) / 10
    write_csv(tmp_path / "csv" / "metrics.csv", {"step": [1], "train/loss": [1]})
    assert [f.name for f in read_run(tmp_path).figures] == ["loss", "step_time"]


def test_throughput_callback_gives_step_times(make_trainer: Any, tmp_path: Path) -> None:
    fit(make_trainer, Throughput(every_n_steps=2), logger=CSVLogger(str(tmp_path)), log_every_n_steps=1)
    figure = next(f for f in read_run(tmp_path).figures if f.name == "step_time")
    assert len(figure.table.rows) == 5
    assert "mean" in figure.caption


def test_step_times_of_other_callbacks_are_found_by_name(tmp_path: Path) -> None:
    columns = {"step": [1], "mine/step_time": [0.5], "yours/step_s": [0.5]}
    write_csv(tmp_path / "metrics.csv", columns)
    assert read_run(tmp_path).figures[0].caption == "mine/step_time, yours/step_s."
    write_csv(tmp_path / "metrics.csv", {**columns, "throughput/step_s": [0.5]})
    assert [row[0].text for row in read_run(tmp_path).figures[0].table.rows] == ["throughput/step_s"]


def test_step_times_and_throughput_are_drawn_as_logged(tmp_path: Path) -> None:
    columns = {"step": [1, 2], "throughput/samples_per_s": [40.0, 80.0], "throughput/step_s": [0.1, 0.05]}
    with_tokens = {**columns, "throughput/tokens_per_s": [4000.0, 8000.0]}
    for given, rates in ((columns, [40.0, 80.0]), (with_tokens, [4000.0, 8000.0])):
        write_csv(tmp_path / "metrics.csv", given)
        drawn = {f.name: f for f in read_run(tmp_path).figures}
        for figure, values in ((drawn["step_time"], [0.1, 0.05]), (drawn["throughput"], rates)):
            assert [row["y"] for row in figure.draw(LIGHT)["datasets"]["data"]] == values
            assert [float(row[2].text.replace(",", "")) for row in figure.table.rows] == values
        kind = "tokens" if "throughput/tokens_per_s" in given else "samples"
        assert {row[0].text for row in drawn["throughput"].table.rows} == {f"throughput/{kind}_per_s"}
        assert "seconds per step" in drawn["step_time"].alternative


def test_unfinished_event_file_is_read_to_its_last_record(tmp_path: Path) -> None:
    path = event_file(tmp_path, 100)
    whole = path.read_bytes()
    count = len(list(records(path)))
    for cut in (1, 5, 17):
        path.write_bytes(whole[:-cut])
        assert len(list(records(path))) in (count - 1, count)
        assert len(of_tensorboard(tmp_path)[0].steps) >= 7
    path.write_bytes(struct.pack("<Q", 2**62) + whole)  # a length that no file has
    assert list(records(path)) == []
    path.write_bytes(struct.pack("<QI", 4, 0) + b"\xff\xff\xff\xff" + bytes(4))
    with pytest.raises(CheckpointError, match="TensorBoard"):
        of_tensorboard(tmp_path)


def test_series_differ_in_their_dashes_too(tmp_path: Path) -> None:
    loss = next(f for f in read_run(make_run(tmp_path)).figures if f.name == "loss").draw(LIGHT)
    line = next(layer for layer in loss["layer"] if layer["mark"]["type"] == "line")["encoding"]
    assert line["strokeDash"]["scale"]["range"] == list(DASHES[:2])
    assert line["color"]["scale"]["range"] == list(LIGHT.marks[:2])
