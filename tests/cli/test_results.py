"""`lightning-solo results`: a table that fits where it is read, and CSV."""

from __future__ import annotations

import csv
import os
import subprocess
import zlib
from pathlib import Path

import pytest

from lightning_solo.atomic_files import write_json
from lightning_solo.cli.results import run
from lightning_solo.errors import NothingToDoError
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.outcome import BEGUN
from lightning_solo.sweeps.results import line_of
from tests.cli.commands import command, environment
from tests.messages import lines_with
from tests.report.folders import make_row, make_sweep

OVERRIDES = ("model.width=8", "optimizer.lr=0.0008311303692128172", "optimizer.betas=[0.9,0.999]")


def shown(folder: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run([str(folder)]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_overrides_are_whole_at_any_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep(tmp_path, [make_row(0, overrides=OVERRIDES), make_row(1)])
    for width in range(90, 200, 10):
        words = " ".join(shown(tmp_path, width, capsys, monkeypatch)).split()
        assert {"optimizer.lr=0.0008311", "optimizer.betas=[0.9,0.999]", "optimizer.lr=1", "loss/memory,"} <= set(words)
    *jobs, same = shown(tmp_path, 90, capsys, monkeypatch)[3:]
    assert jobs == ["#0 optimizer.lr=0.0008311 optimizer.betas=[0.9,0.999]", "#1 optimizer.lr=1"]
    assert same.endswith(": model.width=8")
    assert "overrides" in shown(tmp_path, 140, capsys, monkeypatch)[0]


def test_a_pruned_job_says_so_and_beats_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep(tmp_path, [make_row(0), make_row(1, detail="pruned at 50")])
    _, first, second, *_ = shown(tmp_path, 160, capsys, monkeypatch)
    assert "finished" in first
    assert lines_with(first, "memory", "time")
    assert "pruned at 50" in second
    assert second.endswith("11 s")


def test_a_failed_job_says_why_and_where_and_one_that_was_not_started_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    failed = {"status": "failed", "detail": f"ValueError: bad [luck] {'x' * 100}", "folder": "here/1", "returned": None}
    make_sweep(tmp_path, [make_row(0), make_row(1, **failed)])
    write_json(SweepFolder(tmp_path).listed, {n: ["model.width=8", f"optimizer.lr={n}"] for n in range(3)})
    assert run([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert lines_with(told, "#1 ", failed["detail"], "here/1/output.log")
    assert len(lines_with(told, "2", "not started")) == 1
    assert run([str(tmp_path), "--csv", "-"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("2,model.width=8 optimizer.lr=2,not started,")


def test_without_a_folder_the_sweeps_below_are_listed_the_last_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NothingToDoError, match="lightning-solo train -m"):
        run([])
    for age, name in enumerate(["runs/b", "multirun/2026-11-23/train-a"]):
        sweep = make_sweep(tmp_path / name, [make_row(0), make_row(1, status="failed")])
        os.utime(sweep, (10**9 - 9 + age, 10**9 - 9 + age))
        os.utime(sweep / "results.jsonl", (10**9 - age, 10**9 - age))
    assert run([]) == 0
    _, *sweeps = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in sweeps] == ["runs/b", "multirun/2026-11-23/train-a"]
    assert all(lines_with(line, "2001-09-09", "1 finished", "1 failed") for line in sweeps)
    with pytest.raises(NothingToDoError, match="runs/b"):
        run(["--sort", "loss"])


def test_a_sweep_is_listed_by_either_of_its_files_and_what_has_no_jobs_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "empty" / ".sweep").mkdir(parents=True)
    (tmp_path / "folder" / "results.jsonl").mkdir(parents=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "results.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(NothingToDoError) as refusal:
        run(["foreign"])
    assert lines_with(str(refusal.value), "run=x")
    write_json(SweepFolder(tmp_path / "waits").listed, {0: ["n=0"], 1: ["n=1"]})
    write_json(SweepFolder(tmp_path / "damaged").listed, {"a": ["n=0"]})
    text = line_of(make_row(0)).split(b" ", 1)[1].replace(b'"version": 1', b'"version": 99').strip()
    make_sweep(tmp_path / "newer", []).joinpath("results.jsonl").write_bytes(
        f"{zlib.crc32(text):08x} ".encode() + text + b"\n"
    )
    assert run([]) == 0
    _, *sweeps = capsys.readouterr().out.splitlines()
    damaged, newer, waits = sorted(sweeps)
    assert lines_with(damaged, "damaged", "can't be read")
    assert lines_with(newer, "newer", "another version")
    assert lines_with(waits, "waits", "2 not started")


def test_a_job_in_its_second_attempt_is_not_shown_by_the_row_of_its_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_sweep(tmp_path, [make_row(0), make_row(1, status="failed", detail="old")])
    for job, attempt in ((0, 1), (1, 2)):
        write_json(SweepFolder(tmp_path).job(job).start, {"attempt": attempt, "overrides": [], "folder": "x"})
    assert run([str(tmp_path), "--csv", "-"]) == 1
    first, second = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (first["status"], first["attempt"]) == ("finished", "1")
    assert (second["status"], second["attempt"], second["detail"]) == (BEGUN, "2", "")


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    make_sweep(tmp_path, [make_row(n, detail="x" * 1000) for n in range(200)])  # more than a pipe holds
    arguments = command("results", str(tmp_path), "--csv", "-")
    with subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"job,overrides,")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
