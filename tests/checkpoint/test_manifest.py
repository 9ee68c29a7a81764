"""The newest valid checkpoint of a folder is found, by its manifest or without it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_solo as solo
from lightning_solo.checkpoint.manifest import MANIFEST, Entry, append, difference, entries, require_valid
from lightning_solo.checkpoint.writing import Written, write
from lightning_solo.errors import CheckpointError
from tests.conftest import long
from tests.messages import mentions


def save(path: Path, step: int) -> None:
    write(
        {"global_step": step, "epoch": 0, "weight": torch.full((8,), float(step))},
        path,
        lambda written: append(path.parent, Entry(path.name, step, 0, *written)),
        sync=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path / f"{step}.ckpt", step)
    return tmp_path


def flip(path: Path, place: int | None = None, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= bit
    path.write_bytes(data)


def newest(folder: Path) -> str:
    found = solo.latest_checkpoint(folder)
    assert found is not None
    return Path(found).name


@pytest.mark.row(44)
def test_newest_is_the_one_of_the_most_steps_whatever_the_times_are(folder: Path) -> None:
    for number, step in enumerate((3, 1, 2)):
        os.utime(folder / f"{step}.ckpt", (number, number))
    assert newest(folder) == "3.ckpt"
    save(folder / "last.ckpt", 3)
    assert newest(folder) == "last.ckpt"  # the later one of the same step


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped bit": flip,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another file": lambda path: torch.save({"global_step": 3}, path),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"row 39, {kind}") for kind in DAMAGES])
def test_damaged_file_is_passed_over_with_a_warning(kind: str, folder: Path) -> None:
    DAMAGES[kind](folder / "3.ckpt")
    with pytest.warns(UserWarning, match=r"passed over 3\.ckpt: .+; resuming from 2\.ckpt"):
        assert newest(folder) == "2.ckpt"
    with pytest.raises(CheckpointError, match=mentions("3.ckpt", "1.ckpt, 2.ckpt", "solo.latest_checkpoint(")):
        require_valid(folder / "3.ckpt")


@pytest.mark.parametrize("every", [11, long(1)])
@pytest.mark.row(39)
def test_flipped_bytes_and_truncations_are_found(tmp_path: Path, every: int) -> None:
    path = tmp_path / "1.ckpt"
    save(path, 1)
    whole = path.read_bytes()
    missed = []
    for place in range(0, len(whole), every):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        missed += [] if difference(path) else [place]
        path.write_bytes(whole[:place])
        missed += [] if difference(path) else [-place]
    assert missed == []
    path.write_bytes(whole)
    assert difference(path) is None


@pytest.mark.parametrize(("every", "bits"), [(11, [4]), long(1, range(8))])
@pytest.mark.row(41)
def test_without_a_manifest_flipped_bits_are_found_or_change_nothing(
    tmp_path: Path, every: int, bits: Sequence[int]
) -> None:
    path = tmp_path / "1.ckpt"
    save(path, 1)
    (tmp_path / MANIFEST).unlink()
    whole, saved = path.read_bytes(), torch.load(path, weights_only=True)
    accepted = 0
    for place, bit in product(range(0, len(whole), every), bits):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        if difference(path) is None:
            accepted += 1
            loaded = torch.load(path, weights_only=True)
            assert torch.equal(loaded.pop("weight"), saved["weight"])
            assert loaded == {"global_step": 1, "epoch": 0}
    assert accepted < len(whole) * len(bits) // every // 2


@pytest.mark.row(40)
def test_folder_whose_files_are_all_damaged_is_an_error_never_a_new_start(folder: Path) -> None:
    for step in (1, 2, 3):
        flip(folder / f"{step}.ckpt")
    with pytest.raises(CheckpointError, match=mentions("no valid checkpoint", "3.ckpt", "2.ckpt", "1.ckpt")):
        solo.latest_checkpoint(folder)


def test_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert solo.latest_checkpoint(tmp_path) is None
    assert solo.latest_checkpoint(tmp_path / "missing") is None


MANIFESTS: dict[str, Any] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "not JSON": lambda path: path.write_bytes(b"\xff\x00 nothing\n" * 3),
    "of other types": lambda path: path.write_text('{"file": 3, "step": "x"}\n[1]\n"text"\n'),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"row 41, {kind}") for kind in MANIFESTS])
def test_newest_is_found_without_a_manifest_that_can_be_read(kind: str, folder: Path) -> None:
    MANIFESTS[kind](folder / MANIFEST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest(folder) == "3.ckpt"
    if kind != "a folder":
        assert "3.ckpt" in {entry.file for entry in entries(folder)}  # written anew
    DAMAGES["truncated"](folder / "3.ckpt")
    with pytest.warns(UserWarning, match=r"passed over 3\.ckpt"):
        assert newest(folder) == "2.ckpt"


@pytest.mark.row(41)
def test_manifest_that_names_a_missing_file_is_used_without_it(folder: Path) -> None:
    (folder / "3.ckpt").unlink()
    assert newest(folder) == "2.ckpt"


def test_file_that_was_replaced_before_its_line_was_read_is_valid(folder: Path) -> None:
    """A line is written first: after a kill in between, the path still has the file of the line before."""
    append(folder, Entry("3.ckpt", 4, 0, 1234, "0" * 64))
    assert newest(folder) == "3.ckpt"


def test_renamed_file_is_valid(folder: Path) -> None:
    os.replace(folder / "2.ckpt", folder / "3.ckpt")
    assert difference(folder / "3.ckpt") is None


def test_line_after_an_unfinished_one_is_read(folder: Path) -> None:
    with (folder / MANIFEST).open("ab") as file:
        file.write(b'{"file": "4.ck')
    save(folder / "5.ckpt", 5)
    assert entries(folder)[-1].file == "5.ckpt"


@pytest.mark.row(56)
@pytest.mark.parametrize("name", ["lightning-solo", "torch", "lightning"])
def test_file_of_a_newer_version_is_named(name: str, tmp_path: Path) -> None:
    def record(written: Written) -> None:
        append(tmp_path, Entry("last.ckpt", 1, 0, *written, "", {name: "99.0.0", "python": "3.1"}))

    write({"global_step": 1}, tmp_path / "last.ckpt", record)
    with pytest.warns(match=mentions("last.ckpt", f"{name} 99.0.0", f"'{name}==99.0.0'")):
        assert solo.latest_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    "versions", [None, "9", {"lightning-solo": 9}, {"lightning-solo": "no"}, {"other": "99"}], ids=str
)
def test_other_versions_are_passed_over(versions: Any, tmp_path: Path) -> None:
    write(
        {"global_step": 1},
        tmp_path / "last.ckpt",
        lambda each: append(tmp_path, Entry("last.ckpt", 1, 0, *each, "", versions)),
    )
    assert solo.latest_checkpoint(tmp_path) is not None
    assert solo.latest_checkpoint(f"file://{tmp_path}") == solo.latest_checkpoint(tmp_path)


@pytest.mark.row(85)
@pytest.mark.parametrize("folder", ["s3://bucket/run", "gs://bucket", "https://host/run"])
def test_folder_on_another_machine_is_refused(folder: str) -> None:
    with pytest.raises(CheckpointError, match=mentions(folder, "local folder", "upload")):
        solo.latest_checkpoint(folder)
