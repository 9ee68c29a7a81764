"""Tables as runs leave them: cut off, grown by a resumed run, with values that are no numbers, or no tables at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_solo.errors import CheckpointError
from lightning_solo.report.csv_files import read_memory, read_metrics
from tests.report.folders import write_csv


def test_each_column_has_the_steps_where_it_was_logged(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "m.csv", {"epoch": [0, 0], "step": [9, 19], "a": [1.5, 2], "b": ["", 7]})
    found = read_metrics(path)
    assert {name: (one.steps, one.values) for name, one in found.items()} == {
        "a": ([9, 19], [1.5, 2.0]),
        "b": ([19], [7.0]),
    }


@pytest.mark.row(91)
def test_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("step,loss\n1,3.75\n2,3.5")  # of 3.5001, say
    assert read_metrics(path)["loss"].values == [3.75]
    path.write_text("step,loss\n1,3.75\n2,3.5\n3\n4,1,1\n")  # too few and too many cells
    assert read_metrics(path)["loss"].steps == [1, 2]


def test_steps_that_a_resumed_run_has_repeated_count_once(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "m.csv", {"step": [1, 2, 3, 2, 3, 4], "loss": [9, 8, 7, 8, 6, 5]})
    loss = read_metrics(path)["loss"]
    assert (loss.steps, loss.values) == ([1, 2, 3, 4], [9, 8, 6, 5])


@pytest.mark.parametrize("text", ["", "step,lo", "\n"])
def test_a_file_just_begun_has_no_series(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text)
    assert read_metrics(path) == {}


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "m.csv", {"step": range(5), "loss": [1, "nan", "inf", "soon", 2], "gone": ["nan"] * 5})
    found = read_metrics(path)
    assert (found["loss"].steps, found["loss"].values, found["loss"].left_out) == ([0, 4], [1.0, 2.0], 3)
    assert (found["gone"].values, found["gone"].left_out) == ([], 5)


def test_each_fit_of_a_resumed_run_is_a_part_and_tests_are_left_out(tmp_path: Path) -> None:
    columns = {
        "fit": ["a", "a", "b", "c"],
        "stage": ["fit", "fit", "fit", "test"],
        "step": [1, 2, 1, 0],
        "resident_bytes": [10, 20, 30, 40],
    }
    found = read_memory(write_csv(tmp_path / "memory.csv", columns))
    assert [(one.part, one.steps, one.values) for one in found] == [(0, [1, 2], [10.0, 20.0]), (1, [1], [30.0])]
    columns["stage"] = ["test"] * 4
    assert len(read_memory(write_csv(tmp_path / "memory.csv", columns))) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\n1,2\n", ["a, b", "without 'step'", "CSVLogger"]),
        (os.urandom(300).replace(b"\n", b" ") + b"\n", ["m.csv"]),
        (b'step,loss\n1,"' + b"x" * 200_000 + b'"\n', ["m.csv"]),
    ],
)
def test_file_without_a_table_is_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "m.csv").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_metrics(tmp_path / "m.csv")
    assert [word for word in words if word not in str(caught.value)] == []
