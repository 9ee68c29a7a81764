"""A damaged checkpoint is named with the reason, and with the others in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.checkpoint.damage import loaded, refuse_damaged
from lightning_solo.errors import CheckpointError
from tests.messages import mentions


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.save({"weight": torch.ones(1000)}, tmp_path / "whole.ckpt")
    path = tmp_path / "saved.ckpt"
    path.write_bytes((tmp_path / "whole.ckpt").read_bytes())
    return path


def load(path: Path, **options: Any) -> Any:
    return torch.load(path, weights_only=True, **options)


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    changed = {"empty": b"", "text": b"eight bytes", "cut": content[:middle], "zeros": content[:99] + bytes(middle)}
    path.write_bytes(changed[kind])


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "zeros"])
def test_damaged_file_is_refused_with_the_others(kind: str, checkpoint: Path) -> None:
    damage(checkpoint, kind)
    words = mentions(str(checkpoint), "is damaged", "other checkpoints here: whole.ckpt", "ckpt_path=")
    with pytest.raises(CheckpointError, match=words):
        loaded(load, checkpoint)
    with pytest.raises(CheckpointError, match=mentions("is damaged", "whole.ckpt", "run=x")):
        refuse_damaged(checkpoint, "run=x")
    (checkpoint.parent / "worse.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"here: whole\.ckpt; "):
        refuse_damaged(checkpoint, "run=x")


def test_changed_bit_is_found(checkpoint: Path) -> None:
    """Torch reads such a file."""
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(CheckpointError, match=mentions("is damaged", "data/0", "checksum")):
        refuse_damaged(checkpoint, "run=x")


def test_whole_file_is_loaded_with_the_arguments(checkpoint: Path) -> None:
    refuse_damaged(checkpoint, "run=x")
    assert loaded(load, checkpoint, map_location="meta")["weight"].is_meta


def test_other_errors_are_those_of_the_reader(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        loaded(load, tmp_path / "none.ckpt")
    with pytest.raises(IsADirectoryError):
        loaded(load, tmp_path)
    with pytest.raises(RuntimeError, match="no-such-device"):
        loaded(load, checkpoint, map_location="no-such-device")
