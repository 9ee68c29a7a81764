"""What became of a job, by how its process ended and what it said; and the files that say so."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.atomic_files import read_json, write_json
from lightning_solo.errors import CheckpointError
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.outcome import STATUSES, End, outcome
from tests.messages import lines_with, mentions


def error(kind: str, message: str = "") -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


@pytest.mark.parametrize(
    ("exit_code", "said", "more", "expected"),
    [
        (0, {"returned": 1}, {}, ("finished", "")),
        (-6, {"returned": 1}, {}, ("finished", "SIGABRT")),
        (0, {"returned": 1}, {"timeout_s": 4.0}, ("finished", "")),  # it came to its end in time for that
        (1, error("ValueError", "a\nb"), {}, ("failed", "ValueError: a")),
        (1, error("KeyError"), {}, ("failed", "KeyError")),
        (1, error("OutOfMemoryError", "Allocation on device 0"), {}, ("out of device memory", "device 0")),
        (1, error("RuntimeError", "CUBLAS_STATUS_ALLOC_FAILED when"), {}, ("out of device memory", "CUBLAS")),
        (
            1,
            error("RuntimeError", "[enforce] DefaultCPUAllocator: can't allocate memory"),
            {},
            ("out of host memory", "[enforce]"),
        ),
        (1, error("CompactHydraException", "no\n  preset"), {}, ("failed", "no preset")),
        (1, error("MemoryError"), {}, ("out of host memory", "MemoryError")),
        (-9, None, {"oom_kills": 1}, ("out of host memory", "kernel")),
        (-9, None, {}, ("killed", "SIGKILL")),
        (-15, None, {}, ("killed", "SIGTERM")),
        (-11, None, {}, ("crashed", "SIGSEGV")),
        (-6, None, {"oom_kills": 1}, ("crashed", "SIGABRT")),
        (3, error("SystemExit", "3"), {}, ("exited", "status 3")),
        (0, None, {}, ("exited", "status 0")),
        (-9, None, {"timeout_s": 4.0}, ("timed out", "SIGKILL")),
        (1, error("SIGTERMException"), {"timeout_s": 4.0}, ("timed out", "4 s")),
        (130, error("KeyboardInterrupt"), {"interrupted": True}, ("interrupted", "")),
        (130, error("KeyboardInterrupt"), {}, ("interrupted", "")),
    ],
)
def test_status_of_each_ending(
    exit_code: int, said: dict[str, Any] | None, more: dict[str, Any], expected: tuple[str, str]
) -> None:
    status, detail = outcome(End(exit_code, **more), said)
    assert status == expected[0]
    assert status in STATUSES
    assert lines_with(detail, expected[1]) if expected[1] else detail == ""


def test_json_file_is_complete_or_missing(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.json"
    write_json(file, {"x": 1})
    with pytest.raises(TypeError):
        write_json(file, {"x": object()})
    assert read_json(file) == {"x": 1}
    assert os.listdir(file.parent) == ["b.json"]
    file.write_text(json.dumps({"x": 1})[:-2])
    assert read_json(file) is None
    file.write_text("[1]")
    assert read_json(file) is None
    assert read_json(tmp_path / "missing.json") is None


def hold(folder: Path, ready: Any, done: Any) -> None:
    with SweepFolder(folder).lock():
        ready.set()
        done.wait(120)


def test_lock_of_a_sweep_is_held_by_one_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready, done))
    process.start()
    try:
        assert ready.wait(120)
        with (
            pytest.raises(CheckpointError, match=mentions(f"process {process.pid}", "run=...")),
            SweepFolder(tmp_path).lock(),
        ):
            pass
    finally:
        done.set()
        process.join()
    with SweepFolder(tmp_path).lock():
        assert (tmp_path / ".sweep" / "lock").read_text() == str(os.getpid())
