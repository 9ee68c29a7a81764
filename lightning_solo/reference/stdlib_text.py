"""The source text of the Python standard library: a few megabytes of real text that every machine has."""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from functools import cache
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

# not part of the library itself, or not installed on every machine
LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def library_files() -> list[tuple[str, Path]]:
    """Return (relative path, file) of each module of the standard library, sorted by relative path.

    Raises:
        FileNotFoundError: This Python has no sources of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]  # most files are in the folders left out
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted((path.relative_to(root).as_posix(), path) for path in found)
    if not files:
        raise FileNotFoundError(f"no *.py in {root}: this Python has no sources of its standard library to learn from")
    return files


def is_validation(name: str) -> bool:
    """Return whether a file belongs to the validation split, about one in ten, the same on every machine.

    >>> [name for name in ("ast.py", "os.py", "copy.py", "random.py") if is_validation(name)]
    ['copy.py', 'random.py']
    """
    return zlib.crc32(name.encode()) % 10 == 0


def split_files(max_bytes: int | None) -> tuple[list[Path], list[Path]]:
    """Return the files for training and for validation; they have at most 9/10 and 1/10 of ``max_bytes``."""
    files = library_files()
    train = [(name, path) for name, path in files if not is_validation(name)]
    validation = [(name, path) for name, path in files if is_validation(name)]
    if max_bytes is not None:
        train, validation = up_to(max_bytes * 9 // 10, train), up_to(max_bytes // 10, validation)
    return [path for _, path in train], [path for _, path in validation]


def up_to(max_bytes: int, files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Return files of at most ``max_bytes`` together, chosen by a hash, so that they come from many packages."""
    kept, left = [], max_bytes
    for name, path in sorted(files, key=lambda file: zlib.crc32(file[0][::-1].encode())):
        size = path.stat().st_size
        if size <= left:
            kept.append((name, path))
            left -= size
    return sorted(kept)


@cache
def split_sizes(max_bytes: int | None) -> tuple[int, ...]:
    """Return the bytes of text in the training and in the validation split."""
    return tuple(sum(path.stat().st_size for path in files) for files in split_files(max_bytes))


@cache
def read_splits(max_bytes: int | None) -> tuple[Tensor, Tensor]:
    """Return the text of both splits as two uint8 tensors."""
    train, validation = (b"".join(path.read_bytes() for path in files) for files in split_files(max_bytes))
    return tuple(torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8) for text in (train, validation))  # type: ignore[return-value]


def windows(text: Tensor, context: int) -> Tensor:
    """Return a view (windows, context + 1) in which each byte is a target once, except the first and a remainder.

    >>> windows(torch.arange(8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    return text.unfold(0, context + 1, context)


def spread(rows: Tensor, count: int) -> Tensor:
    """Return ``count`` rows at even distances, or all if there are fewer."""
    if count >= len(rows):
        return rows
    return rows[torch.arange(count) * len(rows) // count]


def unigram_perplexity(train: Tensor, targets: Tensor) -> float:
    """Return the perplexity of ``targets`` under the byte frequencies of ``train``, with 1 added to each count."""
    counts = torch.bincount(train, minlength=256).double() + 1
    cross_entropy = -(counts / counts.sum()).log() @ torch.bincount(targets.flatten(), minlength=256).double()
    return math.exp(cross_entropy.item() / targets.numel())


class StdlibText(L.LightningDataModule):
    """Windows of the Python standard library's source; a batch is a uint8 tensor (batch, context + 1).

    Args:
        context: Bytes that a model reads at once.
        batch_size: Windows in a batch.
        max_bytes: Use only about this much text, in both splits together; None for all of it.
        validation_batches: Validate on this many batches, spread evenly over the split; None for all of it.
        num_workers: Processes that load batches; the text is in memory, so none is usually fastest.
        seed: Seed of the order of training windows.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 16,
        max_bytes: int | None = None,
        validation_batches: int | None = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        counts = {"context": context, "batch_size": batch_size, "validation_batches": validation_batches}
        counts["max_bytes"] = max_bytes
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers} must be at least 0")
        for split, size in zip(("train", "validation"), split_sizes(max_bytes), strict=True):
            if size <= context:
                text = f"the {split} text has {size:,} bytes"
                less = f" with max_bytes={max_bytes}: give more, or" if max_bytes is not None else ": give"
                raise ValueError(f"context={context} needs {context + 1:,} bytes, and {text}{less} a smaller context")
        rows = (split_sizes(max_bytes)[0] - 1) // context
        if batch_size > rows:
            raise ValueError(f"batch_size={batch_size}: the train text has {rows} windows of context={context}")
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.validation_batches = validation_batches
        self.num_workers = num_workers
        self.seed = seed

    @property
    def train_bytes(self) -> int:
        """Bytes of text to train on."""
        return len(read_splits(self.max_bytes)[0])

    @property
    def validation_bytes(self) -> int:
        """Bytes of the validation files; ``validation_batches`` may use fewer."""
        return len(read_splits(self.max_bytes)[1])

    @property
    def train_windows(self) -> Tensor:
        """All training windows, a view (windows, context + 1)."""
        return windows(read_splits(self.max_bytes)[0], self.context)

    @property
    def validation_windows(self) -> Tensor:
        """The windows that validation uses: (windows, context + 1)."""
        rows = windows(read_splits(self.max_bytes)[1], self.context)
        return rows if self.validation_batches is None else spread(rows, self.validation_batches * self.batch_size)

    @property
    def unigram_perplexity(self) -> float:
        """Perplexity of the validation targets under byte frequencies alone, which a model has to beat."""
        return unigram_perplexity(read_splits(self.max_bytes)[0], self.validation_windows[:, 1:])

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader(self.train_windows, shuffle=True, drop_last=True, generator=generator)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.validation_windows)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.validation_windows)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.validation_windows)

    def _loader(self, rows: Tensor, **arguments: object) -> DataLoader[Tensor]:
        # a tensor is a dataset, with a length and rows
        return DataLoader(rows, batch_size=self.batch_size, num_workers=self.num_workers, **arguments)  # type: ignore[arg-type]
