"""A disk that is really full: a small one, mounted where only the sweep sees it, which a job fills."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from lightning_solo.errors import CheckpointError
from lightning_solo.sweeps.results import read
from tests.messages import lines_with, mentions
from tests.sweeps.applications import (
    begun,
    command,
    environment,
    plain_jobs,
    plain_sweep,
    rows_of,
    starts,
    sweep,
    training,
)

MOUNT = "mkdir -p disk && mount -t tmpfs -o size=1m none disk"
MAY_MOUNT = not subprocess.run(["unshare", "-rm", "sh", "-c", MOUNT], cwd="/tmp", capture_output=True).returncode
FILL = """    if cfg.n == 2 and not os.path.exists("filled"):
        open("filled", "w").close()
        with open("disk/filling", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
    return cfg.n * 1.5"""


@pytest.mark.skipif(not MAY_MOUNT, reason="no disk may be mounted here")
def test_full_disk_ends_the_sweep_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    """The second job fills the disk, so that its row or its result can't be written; then it runs again."""
    (tmp_path / "train.py").write_text(training(FILL))
    same = shlex.join(command("n=1,2,3", "hydra.sweep.dir=disk/sweep"))
    lines = [
        MOUNT,
        f"{same} > told.txt 2>&1; echo $? > code.txt; cp -r disk/sweep first; rm disk/filling; cp starts.txt first",
        f"{same} hydra.launcher.rerun=failed > again.txt 2>&1; echo $? >> code.txt; cp -r disk/sweep second",
    ]
    subprocess.run(["unshare", "-rm", "sh", "-c", "\n".join(lines)], cwd=tmp_path, env=environment(), check=True)
    told = (tmp_path / "told.txt").read_text()
    assert lines_with(told, "[Errno 28]", "make room", "same command")
    assert "Traceback" not in told
    assert starts(tmp_path / "first") == {1: 1, 2: 1}
    again = starts(tmp_path)[2]  # a file system may have room for a last small file
    assert starts(tmp_path) == {1: 1, 2: again, 3: 1}
    assert (tmp_path / "code.txt").read_text().split() == ["1", "0"]
    rows = read(tmp_path / "second" / "results.jsonl")
    assert [(row.attempt, row.status, row.returned) for row in rows] == [
        (1, "finished", 1.5),
        (again, "finished", 3.0),
        (1, "finished", 4.5),
    ]


def test_result_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1", script=training("job_process.write_json = once\n    return 'x'", ONCE), code=1)
    (row,) = rows_of(tmp_path)
    assert (row.status, lines_with(row.detail, "OSError: ", "[Errno 28] no room")) == ("failed", [row.detail])


ONCE = """
from lightning_solo.atomic_files import write_json
from lightning_solo.sweeps import job_process

def once(path, data):
    if "returned" in data:
        raise OSError(28, "no room")
    write_json(path, data)"""


def test_row_that_cannot_be_written_is_written_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No job is started any more, and those that run are seen to their ends."""
    jobs = plain_jobs(tmp_path, 4)
    with monkeypatch.context() as patched:
        patched.setattr("lightning_solo.sweeps.results.append", no_room)
        with pytest.raises(CheckpointError, match=mentions("results.jsonl", "[Errno 28]", "make room")):
            plain_sweep(tmp_path, parallel=2).run(jobs)
        with pytest.raises(CheckpointError, match="make room"):  # nothing to run, and no row of what ran
            plain_sweep(tmp_path).run(jobs[:2])
    assert begun(tmp_path) == [0, 1]
    rows = plain_sweep(tmp_path).run(jobs)
    assert [(row.status, row.attempt, row.returned) for row in rows] == [("finished", 1, n) for n in range(4)]
    assert rows == read(tmp_path / "results.jsonl")
    assert begun(tmp_path) == [0, 1, 2, 3]


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")
