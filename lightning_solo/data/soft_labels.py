"""A file of soft labels: for each position of each row, words that were drawn at random from a teacher.

Rows are found by their content, so their order, the size of batches and their padding don't matter. The file is
mapped, and only the rows of a batch are read.

It begins with a line of JSON, padded to `_HEAD` bytes: teacher, part, vocabulary, draws and seed. Blocks follow, one
per batch: a header, the rows' keys and lengths, their words, and the entropy of the teacher at each position. A block
without rows is the last. A file that isn't complete is called ``NAME.partial``, and is continued after its last whole
block.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_solo.atomic_files import open_own, sync, try_lock
from lightning_solo.errors import CheckpointError

_HEAD = 512
_BLOCK = struct.Struct("<4sIQI")  # mark, rows, positions, checksum of the rest
_MARK = b"rows"
LAYOUT = 1
REMEDY = "write them anew by lightning-solo soft-labels"


@dataclass(frozen=True)
class Origin:
    """Where soft labels come from."""

    teacher: str  # digest of the teacher's weights
    name: str  # of the teacher, for messages
    part: str  # of the module whose inputs and outputs the labels are of
    vocabulary: int  # width of its logits
    draws: int  # words per position
    seed: int  # of the draws

    @property
    def dtype(self) -> Any:
        """The type of a stored word."""
        sizes = [(2**8, np.uint8), (2**16, np.uint16)]
        return np.dtype(next((kind for size, kind in sizes if self.vocabulary <= size), np.int32))

    @property
    def position_bytes(self) -> int:
        """Bytes of a position: its words, and the entropy in 16 bits."""
        return self.draws * int(self.dtype.itemsize) + 2


class Rows(NamedTuple):
    """The identity of a batch's rows."""

    keys: Any  # (rows,): digests of their content, in 64 bits
    mask: Any  # (rows, positions) in bool: positions that aren't padding; None if all are to be labelled


def rows_of(inputs: Any, positions: Sequence[int]) -> Rows:
    """Return a digest of each row of a model's inputs, which leaves out padding and labels.

    Args:
        inputs: arguments of the call; padding is where ``attention_mask`` is 0.
        positions: shape of the logits without their last dimension: (rows, ...).
    """
    count = positions[0]
    mappings = [each for each in _mappings(inputs) if isinstance(each.get("attention_mask"), Tensor)]
    mask = mappings[0]["attention_mask"].cpu().numpy() != 0 if mappings else None
    if mask is not None and mask.shape != tuple(positions):
        mask = None
    tensors = [each for each in tree_leaves(_without_labels(inputs)) if isinstance(each, Tensor)]
    arrays = [_array(each) for each in tensors if each.dim() and len(each) == count]
    keys = np.empty(count, np.uint64)
    for row in range(count):
        digest = blake2b(digest_size=8)
        for array in arrays:
            content = array[row]
            if mask is not None and array.shape[:2] == mask.shape:
                content = content[mask[row]]
            digest.update(repr(content.shape).encode())
            digest.update(np.ascontiguousarray(content).data)
        keys[row] = int.from_bytes(digest.digest(), "little")
    return Rows(keys, mask)


def _mappings(inputs: Any) -> Iterable[Mapping[str, Any]]:
    args, kwargs = inputs
    return [kwargs, *(each for each in args if isinstance(each, Mapping))]


def _without_labels(inputs: Any) -> Any:
    def kept(each: Any) -> Any:
        is_mapping = isinstance(each, Mapping)
        return {key: value for key, value in each.items() if key != "labels"} if is_mapping else each

    args, kwargs = inputs
    return [kept(each) for each in args], kept(kwargs)


def _array(tensor: Tensor) -> Any:
    """Return a tensor's numbers in one type of each kind, so that the same row has one key."""
    wide = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else torch.int64)
    return wide.numpy()


class SoftLabels:
    """The soft labels of a file, which stays mapped.

    Raises:
        CheckpointError: it is missing, incomplete, damaged or another kind of file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            partial = partial_of(path)
            rest = f"; {partial.name} isn't complete: run the same command again" if partial.is_file() else ""
            raise CheckpointError(f"{path}: no such file of soft labels{rest or '; ' + REMEDY}")
        self.origin = read_origin(path)
        self._bytes = np.memmap(path, np.uint8, "r")
        index = _Index(self.origin)
        end = index.read(self._bytes)
        if not index.is_complete or end != len(self._bytes):
            raise CheckpointError(f"{path}: it is cut off or damaged after {end:,} bytes; {REMEDY}")
        keys, self._words, self._entropies, self._lengths = index.columns()
        order = np.argsort(keys, kind="stable")
        self._keys, self._rows = keys[order], order

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._keys)

    @property
    def positions(self) -> int:
        """The number of positions of all rows."""
        return int(self._lengths.sum())

    def read(self, inputs: Any, positions: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return words (rows, ..., draws), entropies (rows, ...) and a mask of labelled positions; None for all.

        None takes the place of all if a row isn't in the file, or has another number of positions.
        """
        rows = rows_of(inputs, positions)
        at = np.searchsorted(self._keys, rows.keys)
        at[at == len(self._keys)] = 0
        if not len(self) or not np.array_equal(self._keys[at], rows.keys):
            return None
        each = int(np.prod(positions[1:], dtype=np.int64))
        size, draws = self.origin.dtype.itemsize, self.origin.draws
        words = np.zeros((positions[0], each, draws), self.origin.dtype)
        entropies = np.zeros((positions[0], each), np.float16)
        for row, stored in enumerate(self._rows[at]):
            length, begin, other = (int(column[stored]) for column in (self._lengths, self._words, self._entropies))
            chosen: Any = slice(None) if rows.mask is None else rows.mask[row]
            if length != (each if rows.mask is None else int(chosen.sum())):
                return None
            raw = self._bytes[begin : begin + length * draws * size]
            words[row, chosen] = raw.view(self.origin.dtype).reshape(length, draws)
            entropies[row, chosen] = self._bytes[other : other + 2 * length].view(np.float16)
        shape = tuple(positions)
        mask = None if rows.mask is None else torch.from_numpy(rows.mask).view(shape)
        numbers = torch.from_numpy(words.astype(np.int64)).view(*shape, draws)
        return numbers, torch.from_numpy(entropies.astype(np.float32)).view(shape), mask


class _Index:
    """Places of the rows in a file."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.is_complete = False
        self._blocks: list[tuple[Any, Any, Any, Any]] = []

    def read(self, content: Any) -> int:
        """Add blocks up to the first one that is cut off or has another checksum; return the offset of their end."""
        at, size = _HEAD, self.origin.draws * self.origin.dtype.itemsize
        while at + _BLOCK.size <= len(content) and not self.is_complete:
            mark, rows, positions, checksum = _BLOCK.unpack(content[at : at + _BLOCK.size])
            begin = at + _BLOCK.size
            end = begin + 12 * rows + positions * self.origin.position_bytes
            if mark != _MARK or end > len(content):
                break
            if zlib.crc32(content[begin:end]) != checksum:
                break
            keys = np.frombuffer(content[begin : begin + 8 * rows], np.uint64)
            lengths = np.frombuffer(content[begin + 8 * rows : begin + 12 * rows], np.uint32).astype(np.int64)
            if int(lengths.sum()) != positions:
                break
            before = lengths.cumsum() - lengths
            words = begin + 12 * rows
            self._blocks.append((keys, words + before * size, words + positions * size + before * 2, lengths))
            self.is_complete, at = rows == 0, end
        return at

    def columns(self) -> tuple[Any, ...]:
        """Return keys, places of words, places of entropies, and lengths of all rows."""
        return tuple(np.concatenate(each) for each in zip(*self._blocks, strict=True))

    def keys(self) -> set[int]:
        """Return the keys of all rows."""
        return {int(key) for keys, *_ in self._blocks for key in keys}


def partial_of(path: Path) -> Path:
    """Return the name of a file that isn't complete."""
    return path.with_name(f"{path.name}.partial")


def read_origin(path: Path) -> Origin:
    """Return where a file's labels come from.

    Raises:
        CheckpointError: it isn't a file of soft labels.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    try:
        fields = json.loads(head)
        if fields.pop("soft_labels") != LAYOUT:
            raise ValueError
        return Origin(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: it isn't a file of soft labels, or of another version; {REMEDY}") from error


class SoftLabelWriter:
    """Writes soft labels to ``NAME.partial``, after its whole blocks, and names it ``NAME`` in `finish`.

    Raises:
        CheckpointError: the partial file has another origin, or another process writes it.
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        self.path, self.origin = path, origin
        self._partial = partial_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_own(self._partial)
        if not try_lock(self._file.fileno()):
            self._file.close()
            raise CheckpointError(f"{self._partial}: another process writes it; wait for it, or write another file")
        if os.path.getsize(self._partial) < _HEAD:
            self._file.truncate(0)
            head = json.dumps({"soft_labels": LAYOUT, **asdict(origin)}).encode()
            self._file.write(head.ljust(_HEAD))
            self._file.flush()
        if (before := read_origin(self._partial)) != origin:
            self._file.close()
            differing = [key for key, value in asdict(origin).items() if getattr(before, key) != value]
            raise CheckpointError(
                f"{self._partial}: it has labels of another {', '.join(differing)}; remove it, or write another file"
            )
        content = np.memmap(self._partial, np.uint8, "r")
        index = _Index(origin)
        end = index.read(content)
        self.seen = index.keys()
        self.kept = len(self.seen)
        del content
        self._file.truncate(end - _BLOCK.size if index.is_complete else end)

    def missing(self, rows: Rows) -> list[int]:
        """Return the numbers of the rows that the file lacks, each content once."""
        new = {int(key): row for row, key in reversed([*enumerate(rows.keys)]) if int(key) not in self.seen}
        return sorted(new.values())

    def add(self, rows: Rows, numbers: Sequence[int], words: Tensor, entropies: Tensor) -> None:
        """Append the labels of some rows of a batch as one block.

        Args:
            rows: of the batch.
            numbers: of those to add.
            words: (rows, positions, draws), of the whole batch.
            entropies: (rows, positions).

        Raises:
            OSError: the file can't be written; the next run continues after its last whole block.
        """
        keys = rows.keys[numbers]
        chosen = [slice(None) if rows.mask is None else rows.mask[row] for row in numbers]
        drawn = [words[row].numpy()[at].astype(self.origin.dtype) for row, at in zip(numbers, chosen, strict=True)]
        stored = [entropies[row].numpy()[at].astype(np.float16) for row, at in zip(numbers, chosen, strict=True)]
        lengths = np.array([len(each) for each in drawn], np.uint32)
        self._append(keys, lengths, drawn, stored)
        self.seen.update(map(int, keys))

    def _append(self, keys: Any, lengths: Any, drawn: Sequence[Any], entropies: Sequence[Any]) -> None:
        content = b"".join(part.tobytes() for part in (keys, lengths, *drawn, *entropies))
        positions = int(lengths.sum())
        self._file.write(_BLOCK.pack(_MARK, len(keys), positions, zlib.crc32(content)) + content)
        self._file.flush()

    def finish(self) -> None:
        """Write the end, and give the file its name."""
        self._append(np.empty(0, np.uint64), np.empty(0, np.uint32), [], [])
        self._file.close()
        sync(self._partial)
        self._partial.replace(self.path)
        sync(self.path.parent)

    def close(self) -> None:
        """Close the file, which stays partial unless it is finished."""
        self._file.close()
