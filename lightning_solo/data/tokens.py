"""Windows of a memory-mapped file of tokens, in a shuffled order that isn't stored and can resume within an epoch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_solo.data.epoch_batches import EpochBatches
from lightning_solo.data.loaders import Resumable

DTYPES = {name: getattr(torch, name) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")}
_ROUNDS = 6
_64_BITS = 2**64 - 1


class Permutation:
    """A permutation of ``range(length)``, computed by a cycle-walking Feistel network instead of stored.

    Args:
        length: length of the range.
        key: numbers such as seed and epoch; each key gives another order.

    >>> sorted(Permutation(5, 1, 0)[index] for index in range(5))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, length: int, *key: int) -> None:
        self.length = length
        self._half = max(1, (max(1, length - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        digest = blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 8 * _ROUNDS, 8)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} of a permutation of {self.length}")
        # the network permutes 4**half numbers, at most four times ``length``
        while True:
            index = self._permuted(index)
            if index < self.length:
                return index

    def _permuted(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            mixed = ((right ^ key) * 0x9E3779B97F4A7C15) & _64_BITS
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _64_BITS
            left, right = right, left ^ ((mixed >> 32) & self._mask)
        return (left << self._half) | right


class TokenFile:
    """The tokens of a binary file without a header, which is mapped.

    The pages that are read are released after their copy. So resident memory grows neither with the file nor with the
    tokens read. Workers map the file by its path.

    Args:
        path: path of the file, which must not change while it is in use.
        dtype: type of a token in the file: "uint8", "int8", "uint16", "int16", "uint32", "int32" or "int64".

    Raises:
        FileNotFoundError: there is no file at the path.
        ValueError: an unknown type, or one that doesn't match the file's size.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: str = "uint16") -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: allowed are {', '.join(DTYPES)}")
        self.path = Path(path).absolute()  # workers may have another working directory
        self.dtype = dtype
        if not self.path.is_file():
            raise FileNotFoundError(f"no file of tokens at {self.path}")
        size, itemsize = self.path.stat().st_size, DTYPES[dtype].itemsize
        if size % itemsize:
            raise ValueError(
                f"{self.path} has {size:,} bytes, which dtype={dtype!r} with {itemsize} bytes a token doesn't divide:"
                " was it written in another type, or cut off?"
            )
        self._tokens: int = size // itemsize
        self._map: mmap.mmap | None = None

    def __len__(self) -> int:
        return self._tokens

    def read(self, first: int, count: int) -> Tensor:
        """Return ``count`` tokens from number ``first`` on, as int64."""
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = DTYPES[self.dtype].itemsize
        begin, end = first * size, (first + count) * size
        tokens = torch.frombuffer(bytearray(self._map[begin:end]), dtype=DTYPES[self.dtype]).long()
        if hasattr(self._map, "madvise"):
            page = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page, end - page)
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_map": None}


class TokenWindows(Dataset[Tensor]):
    """The tokens of a `TokenFile` in consecutive windows of equal length; those after the last one are left out.

    Args:
        path: path of the file, which must not change while it is in use.
        window: tokens in an item, which is an int64 tensor of shape (window,).
        dtype: type of a token in the file: "uint8", "int8", "uint16", "int16", "uint32", "int32" or "int64".
        vocabulary: tokens must be below it; None checks only that they aren't negative.

    Raises:
        FileNotFoundError: there is no file at the path.
        ValueError: an argument is out of range or doesn't match the file's size; or, when an item is read, a token is
            out of range.
    """

    def __init__(
        self, path: str | os.PathLike[str], window: int, dtype: str = "uint16", vocabulary: int | None = None
    ) -> None:
        for name, value in (("window", window), ("vocabulary", vocabulary)):
            if (value is not None and (not isinstance(value, int) or value < 1)) or (name, value) == ("window", None):
                raise ValueError(f"{name}={value!r}: allowed are integers from 1 on")
        self.file = TokenFile(path, dtype)
        self.path, self.dtype, self.tokens = self.file.path, dtype, len(self.file)
        self.window = window
        self.vocabulary = vocabulary
        if self.tokens < window:
            raise ValueError(f"window={window} is longer than {self.path}, which has {self.tokens:,} tokens of {dtype}")

    def __repr__(self) -> str:
        arguments = f"{str(self.path)!r}, {self.window}, dtype={self.dtype!r}, vocabulary={self.vocabulary}"
        return f"TokenWindows({arguments})"

    def __len__(self) -> int:
        return self.tokens // self.window

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        tokens = self.file.read(index * self.window, self.window)
        self._check(tokens, index)
        return tokens

    def _check(self, tokens: Tensor, index: int) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (self.vocabulary is not None and high >= self.vocabulary):
            bad = low if low < 0 else high
            at = index * self.window + int((tokens == bad).nonzero()[0])
            bound = "" if self.vocabulary is None else f" to {self.vocabulary - 1}"
            raise ValueError(
                f"{self.path}: token {at:,} is {bad}, and allowed are 0{bound}: was the file written with another"
                f" dtype than {self.dtype}, or by another tokenizer?"
            )


class WindowBatches(EpochBatches):
    """Batches of indexes in a new order each epoch. The order isn't stored, and draws no global random numbers.

    Args:
        length: number of indexes.
        batch_size: indexes in a batch.
        seed: seed of the orders.
        shuffle: False for indexes in ascending order.
        drop_last: leave out a last batch that isn't full.
    """

    def __init__(self, length: int, batch_size: int, seed: int, shuffle: bool, drop_last: bool) -> None:
        super().__init__(seed)
        self.length = length
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.count = length // batch_size if drop_last else -(-length // batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the batches of an epoch from ``start`` on."""
        order: Any = Permutation(self.length, self.seed, epoch) if self.shuffle else range(self.length)
        for first in range(start * self.batch_size, self.count * self.batch_size, self.batch_size):
            yield [order[index] for index in range(first, min(first + self.batch_size, self.length))]

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches(self.epoch, self.start)  # skipped batches aren't computed


class TokenLoader(Resumable):
    """A loader of shuffled windows that can resume within an epoch.

    Lightning saves its ``state_dict`` in checkpoints. The state doesn't depend on the number of workers.

    Args:
        windows: the data set.
        batch_size: windows in a batch.
        seed: of the order.
        shuffle: whether each epoch has another order.
        options: of ``DataLoader``, such as ``num_workers``.

    Raises:
        ValueError: there is a sampler, or no batch size.
    """

    _done = "batches"

    def __init__(
        self, windows: TokenWindows, batch_size: int = 1, seed: int = 0, shuffle: bool = True, **options: Any
    ) -> None:
        samplers = sorted({"sampler", "batch_sampler"} & options.keys())
        if samplers or batch_size is None:
            raise ValueError(
                f"TokenLoader({', '.join(f'{name}=...' for name in samplers) or 'batch_size=None'}) makes the batches"
                " itself; write batch_size=1 or more, seed and shuffle, or a plain DataLoader of the windows"
            )
        super().__init__(windows, batch_size, shuffle, **options)
        # bypass DataLoader.__setattr__, which refuses to replace a sampler
        vars(self)["batch_sampler"] = WindowBatches(len(windows), batch_size, seed, shuffle, self.drop_last)

    def _order(self) -> dict[str, Any]:
        batches = self._batches
        return {
            "windows": batches.length,
            "batch_size": batches.batch_size,
            "seed": batches.seed,
            "shuffle": batches.shuffle,
        }
