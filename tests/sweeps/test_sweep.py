"""What an earlier command's attempt at a job means for the next command: its row counts, or the job is tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_solo.atomic_files import write_json
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.jobs import Job, Settings, Try
from lightning_solo.sweeps.results import Row
from lightning_solo.sweeps.sweep import row_or_try

CODE = {"train.py": "1", "model.py": "2"}
JOB = Job(0, ("x=1",), Path("0"), "abc", bytes)


def decide(status: str | None, code: dict[str, str] = CODE, failures: int = 0, **settings: Any) -> Row | Try:
    """Return the decision for a job whose third attempt, of 5 s, ended with a status; None if it left no result."""
    start = {"attempt": 3, "config_hash": "abc", "code": CODE, "failures": failures}
    row = None if status is None else Row(0, ("x=1",), status, attempt=3, seconds=5.0)
    return row_or_try(JOB, start, row, Settings(**settings), code)


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
    ("status", "settings", "failures", "seconds"),
    [
        (None, {}, 0, 0.0),  # killed with its command
        (None, {"failures": 1, "retries": 2}, 1, 0.0),
        ("interrupted", {}, 0, 5.0),
        ("interrupted", {"failures": 1, "retries": 1}, 1, 5.0),
        ("failed", {"retries": 1}, 1, 5.0),
        ("failed", {"rerun": "failed", "failures": 3}, 0, 5.0),
        ("failed", {"rerun": "all"}, 0, 5.0),
    ],
)
def test_unfinished_job_is_resumed_as_its_next_attempt(
    status: str | None, settings: dict[str, Any], failures: int, seconds: float
) -> None:
    assert decide(status, **settings) == Try(JOB, 4, failures, seconds=seconds)


def test_finished_job_starts_anew_with_rerun_all() -> None:
    assert decide("finished", rerun="all") == Try(JOB, 4, anew="hydra.launcher.rerun=all")


@pytest.mark.parametrize("status", ["finished", "failed", None])
def test_changed_files_start_a_job_anew_except_with_rerun_failed(status: str | None) -> None:
    changed = {**CODE, "model.py": "3", "new.py": "4"}
    assert decide(status, changed) == Try(JOB, 4, anew="model.py, new.py changed")
    kept = decide("finished", changed, rerun="failed")
    assert isinstance(kept, Row)


def test_changed_configuration_starts_a_job_anew_always() -> None:
    start = {"attempt": 1, "config_hash": "another", "code": CODE}
    for rerun in ("never", "failed", "all"):
        tried = row_or_try(JOB, start, Row(0, (), "finished"), Settings(rerun=rerun), CODE)
        assert tried == Try(JOB, 2, anew="its configuration has changed")


def test_job_of_an_older_version_starts_anew() -> None:
    start = {"attempt": 1, "config_hash": "abc", "code": "one hash for all files"}
    tried = row_or_try(JOB, start, Row(0, (), "finished"), Settings(), CODE)
    assert tried == Try(JOB, 2, anew="another version of lightning-solo ran it")


def test_result_of_an_older_attempt_does_not_count(tmp_path: Path) -> None:
    files = SweepFolder(tmp_path).job(0)
    write_json(files.result, {"attempt": 1, "returned": 0.5})
    assert files.result_of(2) is None
    result = files.result_of(1)
    assert result is not None
    assert result["returned"] == 0.5
