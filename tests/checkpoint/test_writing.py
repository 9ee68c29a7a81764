"""A checkpoint's path has the former file or a verified new one, whatever fails while it is written."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_solo.checkpoint import writing
from lightning_solo.checkpoint.writing import digest, tensor_bytes, write
from lightning_solo.errors import CheckpointError
from tests.faults.disk import limited
from tests.faults.kills import killed
from tests.messages import mentions

SIZE = 2500


def content(number: int) -> dict[str, Any]:
    return {"global_step": number, "weight": torch.full((SIZE,), float(number))}


def number_in(path: Path) -> int:
    """Return the number of a checkpoint, whose content is of that number alone."""
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["weight"], content(loaded["global_step"])["weight"])
    return int(loaded["global_step"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(content(1), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_file_has_the_size_and_hash_that_are_returned(path: Path) -> None:
    recorded: list[Any] = []
    written = write(content(2), path, recorded.append)
    assert recorded == [written]
    assert written == digest(path)
    assert number_in(path) == 2
    assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


CALLS = range(0, 140, 3)  # a save has 121 calls and returns of `FAILPOINTS`


@pytest.mark.parametrize("call", [pytest.param(call, id=f"row 32, call {call}") for call in CALLS])
def test_process_killed_at_any_call_leaves_a_whole_file(call: int, path: Path) -> None:
    saved, _ = killed(lambda number: write(content(number), path), 2, call)
    assert number_in(path) >= (saved or 1)


def test_calls_at_which_processes_are_killed_are_those_of_a_whole_save(path: Path) -> None:
    first, last = (killed(lambda number: write(content(number), path), 2, call)[0] for call in (CALLS[0], CALLS[-1]))
    assert first is None
    assert last is not None


LENGTH = 11_500  # bytes of a file here


@given(room=st.integers(0, LENGTH))
@pytest.mark.row(35)
def test_disk_that_is_full_at_any_byte_leaves_the_former_file(
    room: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("full") / "last.ckpt"
    assert write(content(1), path).size > LENGTH
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        limited(patch, room)
        with pytest.raises(CheckpointError, match=mentions("last.ckpt", "the disk is full", "MiB", "unchanged")):
            write(content(2), path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(errno.EDQUOT, "quota", id="row 36, quota"),
        pytest.param(errno.EFBIG, "ulimit", id="row 36, limit of sizes"),
        pytest.param(errno.EROFS, "read-only", id="row 36, read-only disk"),
        pytest.param(errno.EIO, "Input/output error", id="row 36, failing disk"),
    ],
)
def test_failing_disk_is_named_and_leaves_the_former_file(
    number: int, words: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 1000, number)
    with pytest.raises(CheckpointError, match=mentions("last.ckpt", words, "dirpath=")):
        write(content(2), path)
    monkeypatch.undo()
    assert number_in(path) == 1


@pytest.mark.row(35)
def test_too_little_space_is_refused_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 0, 2**19))
    monkeypatch.setattr(torch, "save", lambda *_: pytest.fail("written"))
    with pytest.raises(CheckpointError, match=mentions("1.01 MiB", "512.00 KiB", "dirpath=")):
        write(content(2), path)


@pytest.mark.row(37)
def test_folder_that_can_not_be_written_is_named(path: Path) -> None:
    """Row 37; Lightning's own saving returns without a file."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            path.parent.chmod(0o555)
            for parent in path.parents:
                if os.stat(parent).st_uid == os.getuid() and parent != path.parent and len(parent.parts) > 2:
                    parent.chmod(0o755)
            os.setuid(65534)
            with pytest.raises(CheckpointError, match=mentions("last.ckpt", "user 65534")):
                write(content(2), path)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert number_in(path) == 1


def spoiled(damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage each file between its writing and its reading."""
    stock = writing.verify

    def verify(path: Path, size: int) -> None:
        damage(path)
        stock(path, size)

    monkeypatch.setattr(writing, "verify", verify)


def test_file_that_reads_back_otherwise_never_gets_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(new: Path) -> None:
        data = bytearray(new.read_bytes())
        data[len(data) // 2] ^= 1
        new.write_bytes(data)

    spoiled(flip, monkeypatch)
    with pytest.raises(CheckpointError, match=mentions("can't be read back", "checksum")):
        write(content(2), path)
    spoiled(lambda new: os.truncate(new, 100), monkeypatch)
    with pytest.raises(CheckpointError, match=mentions("can't be read back", "100 bytes")):
        write(content(2), path)
    assert number_in(path) == 1


class Own:
    """An object that only ``weights_only=False`` loads."""


def test_object_that_can_not_be_resumed_is_warned_of_by_name(path: Path) -> None:
    with pytest.warns(UserWarning, match=r"weights_only=True.*Own"):
        write({**content(2), "own": Own()}, path)


def test_bytes_are_those_of_the_storages() -> None:
    weight = torch.ones(1000)
    assert tensor_bytes({"a": weight, "b": [weight[:10], weight.view(10, 100)], "c": "text"}) == 4000


def test_damage_outlives_no_error_of_the_writer(path: Path) -> None:
    """An error that is none of the disk's, such as an object that can't be pickled, is the user's to read."""
    with pytest.raises(Exception, match="pickle"):
        write({**content(2), "own": lambda: None}, path)
    assert number_in(path) == 1
    assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]
