"""What the terminal shows of a sweep: the jobs that run, how many are done, how long it will take, the last lines."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from lightning_solo.atomic_files import write_json
from lightning_solo.sweeps.display import Display
from lightning_solo.sweeps.files import SweepFolder, tail


def display(folder: Path, jobs: int, parallel: int = 1) -> tuple[Display, io.StringIO]:
    """Return a display of jobs on a terminal, and what it has shown there."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    return Display(SweepFolder(folder), {n: f"lr={n}" for n in range(jobs)}, parallel, console), shown


def test_terminal_shows_running_jobs_and_counts_the_others(tmp_path: Path) -> None:
    on_terminal, shown = display(tmp_path, 3)
    progress = {"step": 5, "of_steps": 10, "loss": 0.25, "peak_device_bytes": 3 * 2**29}
    write_json(SweepFolder(tmp_path).job(1).progress, progress)
    with on_terminal.shown():
        on_terminal.tell("started", 0, "")
        on_terminal.tell("ended", 0, "failed ValueError")
        on_terminal.tell("started", 1, "")
        on_terminal.tell("anew", 2, "train.py changed")
        on_terminal.look([1])
        told = shown.getvalue()
    for words in (
        "lr=1",
        "running",
        "5/10",
        "0.25",
        "1.50 GiB",
        "failed ValueError",
        "train.py",
        "1 of 3 jobs done, 1 failed",
    ):
        assert words in told


def test_time_left_follows_from_ended_jobs_and_steps_of_running_ones(tmp_path: Path) -> None:
    shown, _ = display(tmp_path, 3, parallel=2)
    assert shown.seconds_left([]) is None
    shown.seconds = [10.0, 10.0]
    assert shown.seconds_left([]) == 15.0  # three of 10 s, two at a time
    shown.seconds = []
    write_json(SweepFolder(tmp_path).job(0).progress, {"step": 5, "of_steps": 10})
    shown.tell("started", 0, "")
    shown.started[0] = time.monotonic() - 10
    assert shown.seconds_left([0]) == pytest.approx(25, abs=1)  # (3 x 20 - 10) / 2
    shown.started[0] -= 20
    os.utime(SweepFolder(tmp_path).job(0).progress, times=(time.time() - 20,) * 2)
    assert shown.seconds_left([0]) == pytest.approx(15, abs=1)  # steps since the last report aren't known


def test_tail_returns_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("".join(f"line {n}\n" for n in range(1000)))
    assert tail(tmp_path / "output.log", 2) == ["line 998", "line 999"]
    assert tail(tmp_path / "output.log", 0) == tail(tmp_path / "missing.log", 2) == []
