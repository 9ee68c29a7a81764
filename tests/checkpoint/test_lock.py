"""A folder of checkpoints belongs to one run, until its process ends."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from lightning_solo.checkpoint.lock import holds, lock
from lightning_solo.errors import CheckpointError
from tests.messages import mentions


@pytest.mark.parametrize("ends", [pytest.param("killed", id="row 43, killed"), pytest.param("lives", id="row 43")])
def test_lock_ends_with_its_process_though_its_worker_goes_on(ends: str, tmp_path: Path) -> None:
    """A worker of a loader is a fork of the run, and has copies of its open files."""
    ready, forked = os.pipe()
    process = os.fork()
    if process == 0:
        file = lock(tmp_path)
        worker = os.fork()
        if worker != 0:
            os.write(forked, f"{worker}\n".encode())
        signal.pause()
        file.close()
        os._exit(0)
    worker = int(os.read(ready, 100))
    try:
        with pytest.raises(CheckpointError, match=mentions("in use by", f"process {process}", "dirpath=")):
            lock(tmp_path)
        if ends == "killed":
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            lock(tmp_path).close()  # while the worker still runs
            os.kill(worker, 0)
    finally:
        for each in (worker, process) if ends == "lives" else (worker,):
            os.kill(each, signal.SIGKILL)
        if ends == "lives":
            os.waitpid(process, 0)
        os.close(ready)
        os.close(forked)


def test_lock_of_a_folder_that_was_deleted_and_made_again_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with lock(folder) as file:
        assert holds(file, folder)
        shutil.rmtree(folder)
        assert not holds(file, folder)
        folder.mkdir()
        (folder / ".lock").touch()
        assert not holds(file, folder)
        with lock(folder) as again:
            assert holds(again, folder)


@pytest.mark.parametrize("kind", [pytest.param("file", id="row 42, file"), pytest.param("folder", id="row 42, folder")])
def test_unfinished_of_killed_runs_is_removed_and_nothing_else(kind: str, tmp_path: Path) -> None:
    left = tmp_path / ".new-123-456"
    if kind == "file":
        left.write_bytes(b"half")
    else:
        left.mkdir()
        (left / "part").write_bytes(b"half")
    (tmp_path / ".new-ideas").write_text("the user's")
    lock(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".new-ideas"]
