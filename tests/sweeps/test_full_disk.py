"""A disk that is really full: a small one, mounted where only the sweep sees it, which a job fills."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_solo.atomic_files import read_json
from lightning_solo.errors import CheckpointError
from lightning_solo.sweeps.files import keep_room, room_of, write_in_room
from lightning_solo.sweeps.results import read
from lightning_solo.sweeps.server import log_exception
from tests.sweeps.applications import TRAIN, begun, command, environment, plain_jobs, plain_sweep, starts

MOUNT = "mkdir -p disk && mount -t tmpfs -o size=1m none disk"
MAY_MOUNT = not subprocess.run(["unshare", "-rm", "sh", "-c", MOUNT], cwd="/tmp", capture_output=True).returncode
pytestmark = pytest.mark.timeout(300)
FILL = """    if cfg.n == 2:
        with open("disk/filling", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        {end}
    return cfg.n * 1.5"""


@pytest.mark.skipif(not MAY_MOUNT, reason="no disk may be mounted here")
@pytest.mark.parametrize(
    ("end", "status", "detail", "returned"),
    [
        ("return 'x' * 5000", "finished", "", "x" * 5000),
        ("os.write(1, b'x' * 10**5); raise ValueError('bad luck')", "failed", "ValueError: bad luck", None),
        ("return 'x' * 10**5", "failed", "OSError: what it returned could not be written: [Errno 28]", None),
    ],
    ids=["returns", "raises", "returns more than there is room for"],
)
def test_a_full_disk_ends_the_sweep_and_with_room_it_goes_on(
    tmp_path: Path, end: str, status: str, detail: str, returned: object
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("    return cfg.n * 1.5", FILL.format(end=end)))
    same = shlex.join(command("n=1,2,3", "hydra.sweep.dir=disk/sweep"))
    lines = [
        MOUNT,
        f"{same} > told.txt 2>&1; echo $? > code.txt; cp -r disk/sweep first; rm disk/filling; cp starts.txt first",
        f"{same} > again.txt 2>&1; echo $? >> code.txt; cp -r disk/sweep second",
    ]
    subprocess.run(["unshare", "-rm", "sh", "-c", "\n".join(lines)], cwd=tmp_path, env=environment(), check=True)
    told = (tmp_path / "told.txt").read_text()
    why = "[Errno 28] No space left on device; make room there and give the same command again"
    assert f"disk/sweep/.sweep/jobs/2: {why}" in told
    assert "Traceback" not in told
    assert starts(tmp_path / "first") == {1: 1, 2: 1}
    assert starts(tmp_path) == {1: 1, 2: 1, 3: 1}
    assert (tmp_path / "code.txt").read_text().split() == ["1", str(int(status != "finished"))]
    rows = read(tmp_path / "second" / "results.jsonl")
    assert [(row.number, row.attempt, row.status) for row in rows] == [
        (0, 1, "finished"),
        (1, 1, status),
        (2, 1, "finished"),
    ]
    assert [row.returned for row in rows] == [1.5, returned, 4.5]
    assert rows[1].detail.startswith(detail)
    assert len((tmp_path / "second" / "results.jsonl").read_text().splitlines()) == 3
    assert not list((tmp_path / "second").rglob(".room-*"))


def test_a_row_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is started any more, and those that run are seen to their ends."""
    jobs = plain_jobs(tmp_path, 4)
    with monkeypatch.context() as patched:
        patched.setattr("lightning_solo.sweeps.results.append", no_room)
        with pytest.raises(CheckpointError, match=r"results.jsonl: \[Errno 28\] No space left .*; make room there"):
            plain_sweep(tmp_path, parallel=2).run(jobs)
        with pytest.raises(CheckpointError, match="make room there"):  # nothing to run, and no row of what ran
            plain_sweep(tmp_path).run(jobs[:2])
    assert begun(tmp_path) == [0, 1]
    rows = plain_sweep(tmp_path).run(jobs)
    assert [(row.status, row.attempt, row.returned) for row in rows] == [("finished", 1, n) for n in range(4)]
    assert rows == read(tmp_path / "results.jsonl")
    assert begun(tmp_path) == [0, 1, 2, 3]


def test_room_is_kept_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "jobs" / "0" / "end.json"
    keep_room(file)
    with monkeypatch.context() as patched:
        patched.setattr("lightning_solo.sweeps.files.write_json", no_room)
        write_in_room(file, {"status": "finished"})
        assert read_json(file) == {"status": "finished"}
        assert not room_of(file).exists()
        with pytest.raises(OSError, match="room-end"):
            write_in_room(file, {"status": "failed"})
    assert read_json(file) == {"status": "finished"}  # whole, whatever was tried since


def test_a_log_without_room_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", SimpleNamespace(write=no_room, flush=no_room))
        try:
            raise ValueError("bad luck")
        except ValueError:
            log_exception()


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")
