"""The text of the standard library: real, split by file, the same on every run."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from lightning_solo.reference import stdlib_text
from lightning_solo.reference.stdlib_text import StdlibText, library_files, split_files, spread, windows
from tests.messages import mentions

CONF = Path(__file__).parents[2] / "conf/app/data/stdlib_text.yaml"


def test_files_are_the_librarys_own_and_the_split_is_by_file() -> None:
    names = [name for name, _ in library_files()]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not any(part in stdlib_text.LEFT_OUT for name in names for part in Path(name).parts)
    train, validation = split_files(None)
    assert set(train).isdisjoint(validation)
    assert len(train) + len(validation) == len(names)
    assert 0.05 < len(validation) / len(names) < 0.15
    assert (train, validation) == split_files(None)


def test_the_text_is_that_of_the_files() -> None:
    with pytest.raises(ValueError, match="max_bytes=-1 must be at least 1"):
        StdlibText(max_bytes=-1)
    data = StdlibText(max_bytes=300_000)
    train, validation = split_files(300_000)
    assert data.train_bytes == sum(path.stat().st_size for path in train)
    assert data.validation_bytes == sum(path.stat().st_size for path in validation)
    assert 200_000 < data.train_bytes + data.validation_bytes <= 300_000
    assert len({path.parent for path in train}) > 3  # a mixture, not the first package


def test_windows_make_each_byte_a_target_once() -> None:
    data = StdlibText(context=100, max_bytes=300_000, validation_batches=None)
    text = stdlib_text.read_splits(300_000)[0]
    rows = data.train_windows
    assert rows.shape == ((len(text) - 1) // 100, 101)
    assert torch.equal(rows[:, 1:].flatten(), text[1 : 1 + rows[:, 1:].numel()])
    assert torch.equal(rows[1:, 0], rows[:-1, -1])
    assert rows.data_ptr() == text.data_ptr()  # a view
    assert windows(torch.arange(4), 3).tolist() == [[0, 1, 2, 3]]


def test_loaders_give_batches_of_bytes_in_an_order_that_the_seed_decides() -> None:
    def first(seed: int) -> torch.Tensor:
        return next(iter(StdlibText(context=32, batch_size=8, max_bytes=300_000, seed=seed).train_dataloader()))

    assert first(0).shape == (8, 33)
    assert first(0).dtype == torch.uint8
    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    data = StdlibText(context=32, batch_size=8, max_bytes=300_000, validation_batches=5)
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert torch.equal(torch.cat(list(loader)), data.validation_windows)
    assert data.validation_windows.shape == (40, 33)
    assert spread(torch.arange(10), 4).tolist() == [0, 2, 5, 7]


def test_unigram_perplexity_by_hand() -> None:
    data = StdlibText(context=64, max_bytes=300_000, validation_batches=3)
    counts = Counter(bytes(stdlib_text.read_splits(300_000)[0].tolist()))
    total = sum(counts.values()) + 256  # each of the 256 bytes counts once more
    targets = data.validation_windows[:, 1:].flatten().tolist()
    expected = math.exp(-sum(math.log((counts[byte] + 1) / total) for byte in targets) / len(targets))
    assert data.unigram_perplexity == pytest.approx(expected)
    assert 15 < data.unigram_perplexity < 40
    small = stdlib_text.unigram_perplexity(torch.tensor([1, 1, 2], dtype=torch.uint8), torch.tensor([1, 3]))
    assert small == pytest.approx(math.sqrt((259 / 3) * (259 / 1)))  # (2 + 1) / 259 and (0 + 1) / 259


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match=mentions("context=128", "129 bytes", "0 bytes", "max_bytes=10")):
        StdlibText(max_bytes=10)


def test_without_sources_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stdlib_text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="no sources"):
        library_files()


def test_the_yaml_lists_the_constructor() -> None:
    given = yaml.safe_load(CONF.read_text())
    assert given.pop("name") == "stdlib_text"
    data, default = StdlibText(**given), StdlibText()
    assert {name: getattr(data, name) for name in given} == {name: getattr(default, name) for name in given} == given
