"""Rows that survive a torn write, and the front of those that no other beats."""

from __future__ import annotations

import itertools
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_solo.errors import CheckpointError
from lightning_solo.report.sweep_folder import front_of
from lightning_solo.sweeps.results import Row, append, line_of, read
from tests.messages import mentions

ROW = Row(number=0, overrides=("solo=bf16", "lr=1"), status="finished", returned=[1, {"a": 0.5}], metrics={"loss": 2.0})


def test_written_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    rows = [ROW, replace(ROW, number=2, status="failed", detail="ValueError: ü"), replace(ROW, number=1)]
    for row in rows:
        append(file, row)
    assert read(file) == sorted(rows, key=lambda row: row.number)
    again = replace(ROW, number=2, attempt=2)
    append(file, again)
    assert read(file)[2] == again  # the last of a job counts


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path / "results.jsonl") == []
    (tmp_path / "file").touch()
    assert read(tmp_path / "file" / "results.jsonl") == []


@given(cut=st.integers(min_value=0, max_value=len(line_of(ROW)) - 1))
@pytest.mark.row(91)
def test_interrupted_write_loses_only_its_row(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    file = tmp_path_factory.mktemp("results") / "results.jsonl"
    append(file, replace(ROW, number=1))
    with file.open("ab") as torn:
        torn.write(line_of(ROW)[:cut])
    whole = cut == len(line_of(ROW)) - 1  # all but the end of the line
    append(file, replace(ROW, number=2))
    assert [row.number for row in read(file)] == ([0, 1, 2] if whole else [1, 2])


@given(position=st.integers(min_value=0, max_value=len(line_of(ROW)) - 2), bit=st.integers(min_value=0, max_value=7))
@pytest.mark.row(91)
def test_row_with_a_flipped_bit_is_skipped(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int) -> None:
    file = tmp_path_factory.mktemp("results") / "results.jsonl"
    line = bytearray(line_of(ROW))
    line[position] ^= 1 << bit
    file.write_bytes(bytes(line))
    assert read(file) in ([], [ROW])  # a checksum's letter may have changed its case


@pytest.mark.parametrize("change", [{"version": 2}, {"colour": "red"}])
def test_rows_of_another_version_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    text = json.dumps({**json.loads(line_of(ROW).partition(b" ")[2]), **change})
    (tmp_path / "results.jsonl").write_text(f"{zlib.crc32(text.encode()):08x} {text}\n")
    with pytest.raises(CheckpointError, match=mentions("results.jsonl", "version", " 1")):
        read(tmp_path / "results.jsonl")


def test_loss_is_the_returned_number_else_the_validation_loss() -> None:
    assert replace(ROW, returned=0.25).loss == 0.25
    assert replace(ROW, returned=None, metrics={"train/loss": 1.0, "validation/loss": 3.0}).loss == 3.0
    assert replace(ROW, returned=None, metrics={"test/loss": 1.0, "train/loss": 2.0}).loss == 2.0
    assert replace(ROW, returned=None, metrics={"test/loss": 1.0, "accuracy": 2.0}).loss == 1.0
    assert replace(ROW, returned=True, metrics={}).loss is None
    rung = {"loss": 2.5, "step_s": 0.1}  # of a ladder, whose report has its loss twice
    assert replace(ROW, returned=rung, metrics={"train/loss": 1.0}).loss == 2.5
    assert replace(ROW, returned={**rung, "loss": None}, metrics={"train/loss": 1.0}).loss is None
    assert replace(ROW, returned={"accuracy": 0.5}, metrics={"train/loss": 1.0}).loss == 1.0
    assert replace(ROW, status="interrupted").loss is None  # of its last batch


costs = st.one_of(st.none(), st.integers(min_value=0, max_value=4).map(float))


@given(st.lists(st.tuples(costs, costs), max_size=12))
def test_front_has_the_rows_that_no_other_beats(points: list[tuple[float | None, float | None]]) -> None:
    rows = [replace(ROW, number=i, returned=loss, metrics={}, seconds=s) for i, (loss, s) in enumerate(points)]
    front = front_of(rows, "seconds")
    known = [(r, (r.loss, r.seconds)) for r in rows if r.loss is not None and r.seconds is not None]
    beaten = {
        a.number
        for (a, (la, sa)), (_, (lb, sb)) in itertools.permutations(known, 2)
        if lb <= la and sb <= sa and (lb < la or sb < sa)
    }
    assert {row.number for row in front} == {row.number for row, _ in known} - beaten


def test_front_has_only_finished_jobs() -> None:
    rows = [replace(ROW, returned=1.0, seconds=1.0, status="failed"), replace(ROW, returned=2.0, seconds=2.0, number=1)]
    assert [row.number for row in front_of(rows, "seconds")] == [1]
