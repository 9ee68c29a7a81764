"""What an earlier command's attempt at a job means for the next command: its row counts, or the job is tried again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.atomic_files import write_json
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.jobs import Job, Settings, Try
from lightning_solo.sweeps.outcome import End
from lightning_solo.sweeps.results import Row
from lightning_solo.sweeps.sweep import changed, row_or_try

CODE = {"train.py": "1", "model.py": "2"}
JOB = Job(0, ("x=1",), Path("0"), "abc", bytes)


def decide(status: str, failures: int = 0, **settings: Any) -> Row | Try:
    """Return the decision for a job whose third attempt, of 5 s, ended with a status."""
    start = {"attempt": 3, "failures": failures}
    row = Row(0, ("x=1",), status, attempt=3, seconds=5.0)
    return row_or_try(JOB, start, row, Settings(**settings))


@pytest.mark.parametrize(
    ("status", "settings"),
    [
        ("finished", {}),
        ("finished", {"rerun": "failed"}),
        ("failed", {}),
        ("failed", {"failures": 1, "retries": 1}),
        ("killed", {"failures": 2, "retries": 2}),
    ],
)
def test_row_of_an_earlier_command_counts(status: str, settings: dict[str, Any]) -> None:
    kept = decide(status, **settings)
    assert isinstance(kept, Row)
    assert kept.status == status


@pytest.mark.parametrize(
    ("status", "settings", "failures"),
    [
        ("interrupted", {}, 0),
        ("interrupted", {"failures": 1, "retries": 1}, 1),
        ("failed", {"retries": 1}, 1),
        ("failed", {"rerun": "failed", "failures": 3}, 0),
        ("failed", {"rerun": "all"}, 0),
    ],
)
def test_unfinished_job_is_resumed_as_its_next_attempt(status: str, settings: dict[str, Any], failures: int) -> None:
    assert decide(status, **settings) == Try(JOB, 4, failures, seconds=5.0)


def test_job_that_was_retried_alone_is_resumed_alone() -> None:
    start = {"attempt": 3, "alone": True}
    again = row_or_try(JOB, start, Row(0, ("x=1",), "interrupted", attempt=3), Settings())
    assert again == Try(JOB, 4, alone=True)


def test_finished_job_starts_anew_with_rerun_all() -> None:
    assert decide("finished", rerun="all") == Try(JOB, 4, anew="hydra.launcher.rerun=all")


def change(rerun: str = "never", **start: Any) -> str:
    """Return what has changed since a start whose record differs from today's in some entries."""
    return changed(JOB, {"config_hash": "abc", "code": CODE, **start}, Settings(rerun=rerun), CODE)


def test_changed_files_are_named_except_with_rerun_failed() -> None:
    before = {"train.py": "1", "model.py": "0", "gone.py": "4"}
    assert change() == ""
    assert change(code=before) == change("all", code=before) == "gone.py, model.py changed"
    assert change("failed", code=before) == ""


@pytest.mark.parametrize("rerun", ["never", "failed", "all"])
def test_changed_configuration_always_counts(rerun: str) -> None:
    assert change(rerun, config_hash="another") == "its configuration has changed"


def test_code_of_an_older_version_counts_as_changed() -> None:
    assert change(code="a-hash") == "another version of lightning-solo ran it"


def test_end_is_known_where_the_process_that_starts_the_jobs_was_killed_too(tmp_path: Path) -> None:
    files = SweepFolder(tmp_path).job(0)
    files.path.mkdir(parents=True)
    assert files.end_of(2, 100.0) == End(0, 0.0, interrupted=True)
    write_json(files.progress, {})
    os.utime(files.progress, (107.0, 107.0))
    assert files.end_of(2, 100.0) == End(0, 7.0, interrupted=True)
    write_json(files.result, {"attempt": 2, "error": {"type": "ValueError", "message": ""}})
    os.utime(files.result, (108.0, 108.0))
    assert files.end_of(2, 100.0) == End(1, 8.0)
    write_json(files.end, {"attempt": 1, "exit_code": 3})
    assert files.end_of(2, 100.0) == End(1, 8.0)
    write_json(files.end, {"attempt": 2, "exit_code": 3, "seconds": 9.0})
    assert files.end_of(2, 100.0) == End(3, 9.0)


def test_result_of_an_older_attempt_does_not_count(tmp_path: Path) -> None:
    files = SweepFolder(tmp_path).job(0)
    write_json(files.result, {"attempt": 1, "returned": 0.5})
    assert files.result_of(2) is None
    result = files.result_of(1)
    assert result is not None
    assert result["returned"] == 0.5
