"""The process between a sweep and its jobs: when it forks, what a job has of it, and what it says of a job's end."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_solo.errors import CapabilityError
from lightning_solo.processes import NVML
from lightning_solo.sweeps import server
from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.files import KEPT_BYTES, SweepFolder, cut_output
from lightning_solo.sweeps.jobs import Job, Settings
from lightning_solo.sweeps.results import read
from lightning_solo.sweeps.sweep import Sweep
from tests.messages import lines_with
from tests.sweeps.applications import returned, rows_of, starts, sweep, sweep_folder, training

# --- when it forks ---


def test_application_that_uses_cuda_on_import_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        assert "starts CUDA" in str(server.why_not_fork())
    with monkeypatch.context() as patched:
        patched.setattr(server.os, "readlink", lambda _: "/dev/nvidia0")
        assert "opens the CUDA device" in str(server.why_not_fork())


@pytest.mark.long
def test_import_looks_for_a_device_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = f"os.environ.get({NVML!r})"
    script = training(f"return [imported, {look}]", f"imported = {look}")
    monkeypatch.delenv(NVML, raising=False)  # Lightning has set it here
    sweep(tmp_path, "n=1", script=script)
    assert returned(tmp_path) == [["1", None]]
    monkeypatch.setenv(NVML, "0")
    sweep(tmp_path, "n=1", "hydra.launcher.rerun=all", script=script)
    assert returned(tmp_path) == [["1", "0"]]


def test_threads_of_openblas_follow_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.__version__  # brings a copy of OpenBLAS
    found = []
    for threads in ("1", "2", "4"):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
        found.append(server.openblas_threads())
    none, one, three = found
    assert (none, three) == (0, 3 * one)


# --- what a job has of it ---


def test_job_holds_no_file_of_the_server(tmp_path: Path) -> None:
    held = "of = '/proc/self/fd/%s'; return [os.readlink(of % n) for n in range(100) if os.path.lexists(of % n)]"
    sweep(tmp_path, "n=1,2", "sleep=0.5", "hydra.launcher.parallel=2", script=training(held))
    for row in rows_of(tmp_path):
        own = [name for name in row.returned if name.startswith(("socket:", "anon_inode:[pidfd]"))]
        assert own == []
        assert str(sweep_folder(tmp_path) / ".sweep" / "lock") not in row.returned


def test_job_waits_for_threads_and_calls_exit_functions(tmp_path: Path) -> None:
    """Its threads are waited for, and what it registered for its end is called."""
    end = "import threading, atexit; atexit.register(print, 'at exit')\n"
    end += "    threading.Thread(target=lambda: (time.sleep(0.5), print('thread'))).start()\n    return 1"
    sweep(tmp_path, "n=1", script=training(end))
    told = (sweep_folder(tmp_path) / "0" / "output.log").read_text().split("\n")
    assert told[-3:] == ["thread", "at exit", ""]


@pytest.fixture
def ctrl_c_ignored() -> Iterator[None]:
    """As a shell has its background jobs ignore it, and what they start."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_job_of_a_command_that_ignores_ctrl_c_does_not_ignore_it(tmp_path: Path, ctrl_c_ignored: None) -> None:
    (tmp_path / "first.py").touch()
    found = "signal.getsignal(signal.SIGINT) is signal.default_int_handler, 'first' in sys.modules"
    (tmp_path / "mine.py").write_text(f"import signal, sys\ndef found(_):\n    return [{found}]\n")
    application = Application("mine", None, "found", 0, (str(tmp_path), *sys.path), (), preload=("first",))
    job = Job(0, (), tmp_path / "0", "hash", lambda: pickle.dumps(None))
    (row,) = Sweep(SweepFolder(tmp_path), application, Settings()).run([job])
    assert row.returned == [True, True]


def test_output_is_cut_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "output.log"
    for size, kept in [(2**20, 2**20), (2**20 + 1, 2**19)]:
        file.write_bytes(b"a" * (size - 3) + b"end")
        cut_output(file, 2**20)
        assert kept <= file.stat().st_size <= kept + 100
        assert file.read_bytes().endswith(b"aend")
    assert b"hydra.launcher.output_mib" in file.read_bytes()[:100]
    file.write_bytes(b"a" * (4 * KEPT_BYTES))
    cut_output(file, 0)
    assert file.stat().st_size == 4 * KEPT_BYTES
    cut_output(file, 3 * KEPT_BYTES)
    assert KEPT_BYTES < file.stat().st_size < KEPT_BYTES + 100
    cut_output(tmp_path / "missing.log", 1)


# --- what it says of a job's end ---


@pytest.mark.row(89)
def test_kill_for_lack_of_memory_counts_for_the_running_job(tmp_path: Path) -> None:
    count = "from lightning_solo import processes\ncounts = iter([5, 6, 6, 6])\n"
    count += "processes.oom_kills = lambda: next(counts)"
    sweep(tmp_path, "n=1,2", "kind=killed", script=training(before=count), code=1)
    assert [row.status for row in rows_of(tmp_path)] == ["out of host memory", "killed"]


def test_errors_of_jobs_are_described(tmp_path: Path) -> None:
    errors = """from hydra.errors import CompactHydraException
class Mute(Exception):
    def __str__(self):
        raise OSError

ERRORS = [CompactHydraException("a refusal\\n  in lines"), Mute(), ValueError("x" * 10**5)]"""
    sweep(tmp_path, "n=0,1,2", script=training("raise ERRORS[cfg.n]", errors), code=1)
    refusal, mute, long = (row.detail for row in rows_of(tmp_path))
    assert refusal == "a refusal in lines"
    assert mute.startswith("Mute: ")
    assert len(long) < 2100
    assert (sweep_folder(tmp_path) / "0" / "output.log").read_text() == "job 0 of train\na refusal\n  in lines\n"


# --- where there is no room, or no process ---


def test_job_that_cannot_be_started_is_a_failed_row(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "1").touch()  # where its folder should be
    sweep(tmp_path, "n=1,2,3", "hydra.sweep.dir=here", code=1)
    found = read(tmp_path / "here" / "results.jsonl")
    assert [row.status for row in found] == ["finished", "failed", "finished"]
    assert "[Errno 17]" in found[1].detail


def no_room(file: str) -> str:
    """Return the application with a first job that makes a file impossible: a folder stands in its place."""
    make = f"os.path.exists({file}) or os.mkdir({file}); return os.getppid()"
    return training(make)


@pytest.mark.long
def test_job_without_a_result_has_the_status_of_its_process(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1", script=no_room("os.environ['LIGHTNING_SOLO_JOB'] + '/result.json'"), code=1)
    (row,) = rows_of(tmp_path)
    assert lines_with(row.detail, "status 1", "task function")


@pytest.mark.long
def test_rows_that_cannot_be_written_are_written_by_the_same_command(tmp_path: Path) -> None:
    file = tmp_path / "here" / "results.jsonl"
    script = no_room(repr(str(file)))
    done = sweep(tmp_path, "n=1,2", "hydra.sweep.dir=here", script=script, code=1)
    assert lines_with(done.stderr, "make room", "same command")
    assert "Traceback" not in done.stderr
    file.rmdir()
    sweep(tmp_path, "n=1,2", "hydra.sweep.dir=here", script=script)
    assert starts(tmp_path) == {1: 1, 2: 1}
    assert [row.status for row in read(file)] == ["finished"] * 2


def test_other_system_than_linux_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(CapabilityError, match="write hydra/launcher=basic"):
        Sweep(SweepFolder(tmp_path), Application("m", None, "f", 0, (), ()), Settings())
