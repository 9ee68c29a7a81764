"""A file of soft labels gives each row its own, in any order, batch and padding; what isn't whole is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_solo.data.soft_labels import Origin, SoftLabels, SoftLabelWriter, partial_of, rows_of
from lightning_solo.errors import CheckpointError
from tests.messages import mentions

ORIGIN = Origin("0" * 32, "teacher", "", 256, 3, 0)


def texts(rows: int = 10, length: int = 5) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


def labels_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Words and entropies that depend on the row alone."""
    words = torch.stack([(x + shift) % 256 for shift in (1, 2, 3)], -1)
    return words, (x % 8).float() / 4


def write(path: Path, batches: Any, origin: Origin = ORIGIN, *, finish: bool = True) -> SoftLabelWriter:
    writer = SoftLabelWriter(path, origin)
    for args, kwargs in batches:
        x = args[0] if args else kwargs["input_ids"]
        rows = rows_of((args, kwargs), x.shape)
        if numbers := writer.missing(rows):
            writer.add(rows, numbers, *labels_of(x))
    writer.finish() if finish else writer.close()
    return writer


@pytest.mark.every_change
def test_rows_have_their_labels_in_any_order(tmp_path: Path) -> None:
    x = texts()
    write(tmp_path / "a", [((x[:4],), {}), ((x[4:],), {})])
    labels = SoftLabels(tmp_path / "a")
    assert (len(labels), labels.positions) == (10, 50)
    order = torch.tensor([7, 2, 9, 0, 2])
    read = labels.read(((x[order].to(torch.uint8),), {}), (5, 5))  # of another type, with the same numbers
    assert read is not None
    words, entropies, mask = read
    expected = labels_of(x[order])
    assert torch.equal(words, expected[0])
    assert torch.equal(entropies, expected[1])
    assert mask is None


def test_bytes_are_one_per_draw_and_two_per_position(tmp_path: Path) -> None:
    x = texts(100, 32)
    write(tmp_path / "a", [((x,), {})])
    # head + two headers of blocks of 20 + per row 8 (key) + 4 (length) + per position 3 draws + 2 (entropy)
    assert (tmp_path / "a").stat().st_size == 512 + 2 * 20 + 100 * (8 + 4 + 32 * (3 + 2))
    assert [replace(ORIGIN, vocabulary=v).dtype for v in (256, 257, 65536, 65537)] == [
        np.uint8, np.uint16, np.uint16, np.int32,
    ]  # fmt: skip


def test_padding_and_labels_do_not_matter(tmp_path: Path) -> None:
    x = texts(3, 6)
    lengths = torch.tensor([4, 6, 2])
    mask = (torch.arange(6)[None] < lengths[:, None]).long()
    batch = {"input_ids": x, "attention_mask": mask, "labels": x.clone()}
    write(tmp_path / "a", [((), batch)])
    labels = SoftLabels(tmp_path / "a")
    assert labels.positions == 12
    wider = torch.full((2, 8), 77)  # the last and the first row, padded otherwise, on the left
    there = torch.zeros(2, 8, dtype=torch.int64)
    for row, old in enumerate((2, 0)):
        wider[row, 8 - lengths[old] :], there[row, 8 - lengths[old] :] = x[old, : lengths[old]], 1
    read = labels.read((({"input_ids": wider, "attention_mask": there},), {}), (2, 8))
    assert read is not None
    words, entropies, counted = read
    assert counted is not None
    assert torch.equal(counted, there == 1)
    for row, old in enumerate((2, 0)):
        expected = labels_of(x[old, : lengths[old]])
        assert torch.equal(words[row, 8 - lengths[old] :], expected[0])
        assert torch.equal(entropies[row, 8 - lengths[old] :], expected[1])


def test_other_rows_have_none(tmp_path: Path) -> None:
    x = texts()
    write(tmp_path / "a", [((x,), {})])
    labels = SoftLabels(tmp_path / "a")
    other = x.clone()
    other[3, 2] += 1
    for args, kwargs in [((other,), {}), ((x[:, :-1],), {}), ((x, x), {}), ((x,), {"positions": x})]:
        assert labels.read((args, kwargs), args[0].shape) is None
    assert labels.read(((x[:2],), {}), (2, 4)) is None  # logits of another number of positions
    assert labels.read(((x,), {"use_cache": False}), x.shape) is not None


def test_rows_of_one_position_each(tmp_path: Path) -> None:
    pictures = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    writer = SoftLabelWriter(tmp_path / "a", ORIGIN)
    rows = rows_of(((pictures,), {}), (4,))
    words = torch.arange(12).view(4, 1, 3)
    writer.add(rows, writer.missing(rows), words, torch.ones(4, 1))
    writer.finish()
    read = SoftLabels(tmp_path / "a").read(((pictures.flip(0),), {}), (4,))
    assert read is not None
    assert torch.equal(read[0], words.flip(0).squeeze(1))
    assert read[1].shape == (4,)


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_file_continues_after_its_last_whole_block(tmp_path: Path, cut: int) -> None:
    x = texts()
    batches: list[Any] = [((x[:4],), {}), ((x[4:8],), {}), ((x[8:],), {})]
    write(tmp_path / "whole", batches)
    write(tmp_path / "a", batches[:2], finish=False)
    partial = partial_of(tmp_path / "a")
    os.truncate(partial, partial.stat().st_size - cut)
    assert not (tmp_path / "a").exists()
    with pytest.raises(CheckpointError, match=mentions("a.partial", "same command")):
        SoftLabels(tmp_path / "a")
    writer = write(tmp_path / "a", batches)
    assert writer.kept == (8 if cut == 0 else 4)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not partial.exists()


def test_end_that_was_written_before_the_name_is_continued(tmp_path: Path) -> None:
    x = texts()
    write(tmp_path / "whole", [((x,), {})])
    (tmp_path / "whole").rename(partial_of(tmp_path / "a"))
    write(tmp_path / "a", [((x,), {})])
    assert len(SoftLabels(tmp_path / "a")) == 10


def test_damaged_block_of_a_partial_file_is_written_anew(tmp_path: Path) -> None:
    x = texts()
    batches: list[Any] = [((x[:4],), {}), ((x[4:],), {})]
    write(tmp_path / "whole", batches)
    write(tmp_path / "a", batches, finish=False)
    partial = partial_of(tmp_path / "a")
    content = bytearray(partial.read_bytes())
    content[-3] ^= 1
    partial.write_bytes(content)
    assert write(tmp_path / "a", batches).kept == 4
    assert (tmp_path / "a").read_bytes() == (tmp_path / "whole").read_bytes()


def test_flipped_bit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [((texts(),), {})])
    content = bytearray((tmp_path / "a").read_bytes())
    content[600] ^= 1  # in the first block
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=mentions("damaged", "soft-labels")):
        SoftLabels(tmp_path / "a")


def test_incomplete_and_other_files_are_refused(tmp_path: Path) -> None:
    x = texts()
    write(tmp_path / "a", [((x,), {})])
    content = (tmp_path / "a").read_bytes()
    for size in (0, 100, 512, 600, len(content) - 20, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=mentions("cut", "soft-labels")):
            SoftLabels(tmp_path / "cut")
    (tmp_path / "cut").write_bytes(content + b"more")
    with pytest.raises(CheckpointError, match=mentions("cut", "soft-labels")):
        SoftLabels(tmp_path / "cut")
    with pytest.raises(CheckpointError, match=mentions("missing", "soft-labels")):
        SoftLabels(tmp_path / "missing")


def test_partial_file_of_another_origin_is_refused(tmp_path: Path) -> None:
    x = texts()
    write(tmp_path / "a", [((x,), {})], finish=False)
    for field, value in {"teacher": "1" * 32, "vocabulary": 257, "draws": 4, "seed": 1}.items():
        with pytest.raises(CheckpointError, match=mentions("a.partial", field, "remove")):
            SoftLabelWriter(tmp_path / "a", replace(ORIGIN, **{field: value}))
    writer = SoftLabelWriter(tmp_path / "a", ORIGIN)
    with pytest.raises(CheckpointError, match=mentions("another process")):
        SoftLabelWriter(tmp_path / "a", ORIGIN)
    writer.close()
