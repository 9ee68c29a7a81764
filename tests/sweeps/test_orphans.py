"""Jobs whose command was killed, and the process that started them too."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lightning_solo.sweeps.results import read
from tests.sweeps.applications import popen, starts, sweep, sweep_folder
from tests.sweeps.test_launcher import children_of_server, is_alive, until

pytestmark = pytest.mark.timeout(300)


def orphan(folder: Path, *overrides: str) -> int:
    """Start a job, kill its command and the process between, and return the job's process."""
    with popen(folder, *overrides) as command:
        until(lambda: starts(folder) == {1: 1})
        (job,) = children_of_server(sweep_folder(folder))
        server = int(Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[1])
        command.kill()
        os.kill(server, signal.SIGKILL)
        until(lambda: not is_alive(server))
    return job


@pytest.mark.parametrize("kind", ["hang", "deaf"])
def test_an_orphan_is_named_and_ended_in_time(tmp_path: Path, kind: str) -> None:
    overrides = ["n=1", f"kind={kind}", "hydra.launcher.timeout_s=3", "hydra.launcher.grace_s=0.5"]
    job = orphan(tmp_path, *overrides)
    done = sweep(tmp_path, *overrides, code=1)
    told = (
        f"#0 n=1 kind={kind}: still running, started by an earlier command: process {job}, which may take 3 s from its"
    )
    assert told in done.stdout
    assert not is_alive(job)
    (row,) = read(sweep_folder(tmp_path) / "results.jsonl")
    assert (row.status, row.attempt) == ("timed out", 1)
    assert row.detail == "after 3 s (hydra.launcher.timeout_s), started by an earlier command"
    assert row.seconds is not None
    assert row.seconds > 3  # from its start, not from this command's
    sweep(tmp_path, *overrides, code=1)
    assert starts(tmp_path) == {1: 1}


def test_an_orphan_without_a_limit_is_named_with_how_to_end_it(tmp_path: Path) -> None:
    job = orphan(tmp_path, "n=1", "sleep=8")
    done = sweep(tmp_path, "n=1", "sleep=8")
    told = f"process {job}, without a limit of its time (hydra.launcher.timeout_s); to end it: kill {job}"
    assert told in done.stdout
    (row,) = read(sweep_folder(tmp_path) / "results.jsonl")
    assert (row.status, row.returned) == ("finished", 1.5)
    assert starts(tmp_path) == {1: 1}


def test_a_job_whose_time_another_process_keeps_is_left_to_it(tmp_path: Path) -> None:
    with popen(tmp_path, "n=1", "sleep=6") as command:
        until(lambda: starts(tmp_path) == {1: 1})
        command.kill()
    done = sweep(tmp_path, "n=1", "sleep=6", "hydra.launcher.timeout_s=0.1")
    assert "#0 n=1 sleep=6: still running, started by an earlier command\n" in done.stdout
    assert [row.status for row in read(sweep_folder(tmp_path) / "results.jsonl")] == ["finished"]
