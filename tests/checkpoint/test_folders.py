"""A folder of files is whole or absent, and a changed file in it is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_solo.checkpoint.folders import HASHES, refuse_changed, whole_folder
from lightning_solo.checkpoint.lock import lock
from lightning_solo.errors import CheckpointError
from tests.faults.kills import killed
from tests.messages import mentions


def save(folder: Path, number: int) -> None:
    with whole_folder(folder) as new:
        (new / "states").mkdir()
        for name in ("states/model", "states/optimizer", "latest"):
            (new / name).write_text(f"{name} {number}")


def number_in(folder: Path) -> int:
    refuse_changed(folder)
    numbers = {(folder / name).read_text().split()[-1] for name in ("states/model", "states/optimizer", "latest")}
    assert len(numbers) == 1
    return int(numbers.pop())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "saved", 1)
    return tmp_path / "saved"


def test_folder_replaces_the_one_before(folder: Path) -> None:
    assert number_in(folder) == 1
    (folder / "of the first").touch()
    save(folder, 2)
    assert number_in(folder) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["latest", HASHES, "states"]
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_error_leaves_the_folder_before(folder: Path) -> None:
    def fail() -> None:
        with whole_folder(folder) as new:
            (new / "states").mkdir()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert number_in(folder) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_folder_gets_its_name_back_where_the_new_one_cannot_take_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, targets = Path.rename, list[Path]()

    def rename(path: Path, target: Path) -> Path:
        targets.append(target)
        if len(targets) == 2:
            raise OSError("no more links")
        return stock(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no more links"):
        save(folder, 2)
    assert number_in(folder) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]


def test_list_that_is_damaged_is_no_missing_list(folder: Path) -> None:
    (folder / HASHES).write_text("{")
    with pytest.raises(CheckpointError, match=mentions("saved", HASHES)):
        refuse_changed(folder)


@pytest.mark.parametrize("change", ["flipped", "truncated", "missing"])
@pytest.mark.row(39)
def test_changed_file_is_found(change: str, folder: Path) -> None:
    file = folder / "states" / "model"
    data = file.read_bytes()
    file.unlink() if change == "missing" else file.write_bytes({"flipped": b"M" + data[1:], "truncated": b""}[change])
    with pytest.raises(CheckpointError, match=mentions("saved", "states/model")):
        refuse_changed(folder)


@pytest.mark.parametrize("call", range(0, 120, 5))
@pytest.mark.row(32)
def test_killed_save_leaves_a_whole_folder_or_none(call: int, folder: Path) -> None:
    """Two renames replace a folder: between them there is none; the file beside it stays."""
    killed(lambda number: save(folder, number), 2, call)
    lock(folder.parent).close()
    assert sorted(path.name for path in folder.parent.iterdir()) in ([".lock"], [".lock", "saved"])
    assert not folder.exists() or number_in(folder) >= 1
    save(folder, 100)
    assert number_in(folder) == 100


def test_folder_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "states").touch()
    refuse_changed(tmp_path)
    assert os.listdir(tmp_path) == ["states"]
