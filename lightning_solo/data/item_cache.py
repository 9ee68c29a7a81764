"""A store of a data set's items with a fixed number of bytes, which worker processes share."""

from __future__ import annotations

import io
import operator
import os
import pickle
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_solo.random_states import get_states, global_sources, same

PROBES = 8  # items that are loaded twice
_COUNTERS = struct.Struct("<qqq512s")  # bytes used, items, whether full, why an item wasn't stored
_ENTRY = struct.Struct("<qq")  # offset, and bytes; 0 bytes: not stored, -1: can't be stored


class ItemStore:
    """Items by index in a file without a name, in host memory or on a disk.

    The file disappears with the last process that has it open, also after a crash. A process that is started by
    ``fork`` or ``spawn`` shares it.

    Args:
        count: number of items.
        budget: most bytes of stored items.
        folder: of the file on a disk, empty for the system's temporary one; None for host memory.

    Raises:
        OSError: the file can't be created, or the system isn't Linux.
    """

    def __init__(self, count: int, budget: int, folder: str | None = None) -> None:
        if sys.platform != "linux":  # workers open the file by /proc
            raise OSError(f"{sys.platform} instead of Linux")
        self.count = count
        self.budget = budget
        if folder is None:
            file = os.memfd_create("item_cache")
        else:
            file, path = tempfile.mkstemp(prefix="item_cache", dir=folder or None)
            os.unlink(path)
        os.ftruncate(file, _COUNTERS.size + count * _ENTRY.size)
        self._open(file, f"/proc/{os.getpid()}/fd/{file}")

    def _open(self, file: int, path: str) -> None:
        self._file, self._path = file, path
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, os.close, file)

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "budget": self.budget, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open(os.open(self._path, os.O_RDWR), self._path)

    @property
    def is_open(self) -> bool:
        return self.close.alive

    def _counters(self) -> tuple[int, int, int, bytes]:
        return _COUNTERS.unpack(os.pread(self._file, _COUNTERS.size, 0))

    @property
    def bytes_used(self) -> int:
        return self._counters()[0]

    @property
    def items(self) -> int:
        return self._counters()[1]

    @property
    def is_full(self) -> bool:
        return bool(self._counters()[2])

    @property
    def unstored(self) -> str:
        """Why the first item that can't be stored can't; empty if there is none."""
        return self._counters()[3].rstrip(b"\0").decode(errors="ignore")

    def get(self, index: int) -> bytearray | None:
        """Return the bytes of an item, or None."""
        offset, size = self._entry(index)
        if size <= 0:
            return None
        stored = bytearray(size)
        done = 0
        while done < size:
            read = os.preadv(self._file, [memoryview(stored)[done:]], offset + done)
            if not read:
                return None
            done += read
        return stored

    def put(self, index: int, stored: bytes | None, reason: str = "") -> None:
        """Store an item's bytes if they fit; with None, record that it can't be stored, and the first ``reason``."""
        import fcntl  # not on Windows, where this module is imported too

        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)  # flock would let in forked workers, which share the open file
            try:
                self._put(index, stored, reason)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _put(self, index: int, stored: bytes | None, reason: str) -> None:
        used, items, full, why = self._counters()
        if self._entry(index)[1]:
            return
        entry = (0, -1)
        if stored is None:
            why = why if why.rstrip(b"\0") else reason.encode()[:512]
        elif used + len(stored) > self.budget:
            full = 1
        else:
            offset = _COUNTERS.size + self.count * _ENTRY.size + used
            if not self._write(stored, offset):
                full = 1
            else:
                entry = offset, len(stored)
                used, items = used + len(stored), items + 1
        os.pwrite(self._file, _COUNTERS.pack(used, items, full, why), 0)
        at = _COUNTERS.size + index * _ENTRY.size
        os.pwrite(self._file, struct.pack("<q", entry[0]), at)
        os.pwrite(self._file, struct.pack("<q", entry[1]), at + 8)  # last: readers take no lock

    def _write(self, stored: bytes, offset: int) -> bool:
        done = 0
        try:
            while done < len(stored):
                done += os.pwrite(self._file, memoryview(stored)[done:], offset + done)
        except OSError:  # the disk is full
            return False
        return True

    def wants(self, index: int) -> bool:
        """Return whether an item has neither been stored nor refused."""
        return self._entry(index)[1] == 0

    def _entry(self, index: int) -> tuple[int, int]:
        read = os.pread(self._file, _ENTRY.size, _COUNTERS.size + index * _ENTRY.size)
        return _ENTRY.unpack(read)


class CachedItems(Dataset[Any]):
    """A map-style data set whose items are loaded once and then read from a store; other attributes are its own.

    Args:
        dataset: with ``len``, and items that are always the same.
        store: for as many items.
    """

    def __init__(self, dataset: Any, store: ItemStore) -> None:
        self.dataset = dataset
        self.store = store

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "store") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: Any) -> Any:
        place = self._place(index)
        if place is None:
            return self.dataset[index]
        if (stored := self.store.get(place)) is not None:
            return pickle.loads(stored)
        return self._keep(place, self.dataset[index])

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return several items; those that aren't stored are loaded at once where the data set can."""
        if not getattr(self.dataset, "__getitems__", None):
            return [self[index] for index in indices]
        places = [self._place(index) for index in indices]
        found = [None if place is None else self.store.get(place) for place in places]
        missing = [at for at, stored in enumerate(found) if stored is None]
        loaded = self.dataset.__getitems__([indices[at] for at in missing]) if missing else []
        items: list[Any] = [None if stored is None else pickle.loads(stored) for stored in found]
        for at, item in zip(missing, loaded, strict=True):
            place = places[at]
            items[at] = item if place is None else self._keep(place, item)
        return items

    def _place(self, index: Any) -> int | None:
        """Return the place of an item in the store; None for what isn't an index, such as a column's name."""
        if not self.store.is_open:
            return None
        try:
            place = operator.index(index)
        except TypeError:
            return None
        place += self.store.count if place < 0 else 0
        return place if 0 <= place < self.store.count else None

    def _keep(self, place: int, item: Any) -> Any:
        if self.store.wants(place):
            try:
                stored, reason = packed(item), ""
            except Exception as error:  # pickling runs code of the item's classes
                stored, reason = None, f"item {place} of type {type(item).__name__} ({error})"
            self.store.put(place, stored, reason)
        return item


def packed(item: Any) -> bytes:
    """Return an item's bytes, from which ``pickle.loads`` makes an equal one with memory of its own.

    Raises:
        TypeError: it has a tensor that isn't a plain one on the host.
        Exception: it can't be pickled.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(item)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not plain or value.requires_grad or value.is_quantized:
            raise TypeError(
                f"a tensor of type {type(value).__name__} on {value.device}, {value.layout}: not a plain one"
            )
        dense = value.resolve_conj().resolve_neg().clone()  # of a view only its own elements
        flat = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage())
        stored = bytearray(flat.numpy().tobytes() if dense.numel() else b"")
        return _tensor, (stored, dense.dtype, tuple(dense.shape), dense.stride())


def _tensor(stored: bytearray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    if not stored:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(stored, dtype=dtype).as_strided(shape, stride)


def changing_item(dataset: Any) -> str | None:
    """Return which item differs between two loads, or draws random numbers; None if none of a few does."""
    count = len(dataset)
    for index in sorted({round(at * (count - 1) / (PROBES - 1)) for at in range(PROBES)} if count else ()):
        before = get_states(global_sources())
        one = _packed_or_none(dataset[index])
        if not same(get_states(global_sources()), before):
            return f"whose item {index} draws random numbers"
        if one != _packed_or_none(dataset[index]):
            return f"whose item {index} differs between two loads"
    return None


def _packed_or_none(item: Any) -> bytes | None:
    try:
        return packed(item)
    except Exception:  # such an item isn't cached
        return None
