"""Tensors that lie in host memory and are computed with on the device: in slabs of exact size, and the way to and fro.

Torch's own pinned memory is rounded up to powers of two, 1.78 times of what is asked for where it was measured; a slab
is as large as what lies in it. `Staging` brings a piece of it to the device and back on streams of its own: while one
piece is computed with, the next ones come and those before go. The host runs ahead of the device, so what is asked for
there is under way long before the device needs it: as far ahead as there are buffers, so that the bus is busy while the
device computes a long product. On a CPU the same pieces are copied to and fro, without streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.errors import BudgetError
from lightning_solo.machine import host_memory
from lightning_solo.units import format_bytes

Wanted = Sequence[tuple[int, torch.dtype]]
"""(elements, type) of tensors."""

ALIGNMENT = 128
"""Bytes to which each tensor of a slab is aligned."""
SLAB_BYTES = 2**30
"""Of a slab: several tensors that together take more lie in several, so that memory of some can be given back."""
SLOTS = {"cpu": 1, "cuda": 3}
"""Staging buffers at least: on a GPU one is on its way there, one computed with, one on its way back."""
SERVED_PART, STAGING_BYTES = 16, 2**29
"""On a GPU buffers take a sixteenth of what passes through them, up to 512 MiB: what comes ahead of a long product."""
HUGE_PAGE = 2**21


def host_tensors(wanted: Wanted, device: torch.device) -> list[Tensor]:
    """Return flat tensors of zeros in slabs of host memory, pinned where the device is a GPU.

    Each has a storage of its own, so that it is saved without the others. A slab is freed with the last of its tensors.

    Args:
        wanted: of each.
        device: that will read and write them.
    """
    if is_planned():
        return [torch.zeros(count, dtype=kind) for count, kind in wanted]
    made: list[Tensor] = []
    for part in _slabs(wanted):
        made += _slab(part, device)
    return made


def _slabs(wanted: Wanted) -> Iterator[Wanted]:
    """Yield what goes into one slab each, in order."""
    part: list[tuple[int, torch.dtype]] = []
    size = 0
    for count, kind in wanted:
        more = _aligned(count * kind.itemsize)
        if part and size + more > SLAB_BYTES:
            yield part
            part, size = [], 0
        part.append((count, kind))
        size += more
    if part:
        yield part


def _slab(wanted: Wanted, device: torch.device) -> list[Tensor]:
    size = _size(wanted)
    if not size:
        return [torch.zeros(0, dtype=kind) for _, kind in wanted]
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # pages are taken as they are written
    # what the tensors hold: unlike an mmap, it is finalized while its memory is still there
    slab = (ctypes.c_char * size).from_buffer(memory)
    if device.type == "cuda":
        memory.madvise(mmap.MADV_DONTFORK)  # else each data loader's worker would get a copy of what is pinned
        if size >= HUGE_PAGE:
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock, and to look up in a copy
        _pin(slab, device)
    made, at = [], 0
    for count, kind in wanted:
        whole = torch.frombuffer(slab, dtype=kind, count=count, offset=at) if count else torch.zeros(0, dtype=kind)
        made.append(whole)
        at += _aligned(count * kind.itemsize)
    return made


def _size(wanted: Wanted) -> int:
    return sum(_aligned(count * kind.itemsize) for count, kind in wanted)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_planned() -> bool:
    """Return whether tensors are without data here: a plan counts bytes, and is judged by their sum."""
    return isinstance(torch.empty(0), FakeTensor)


def host_room() -> int:
    """Return the bytes that may be taken of the host, by its control groups too; a twentieth is left."""
    return host_memory()[1] * 19 // 20


def require_host_room(what: str, wanted: Wanted, remedy: str) -> None:
    """Check that the host has the memory that `host_tensors` would take.

    Raises:
        BudgetError: it hasn't.
    """
    needed, there = _size(wanted), host_room()
    if needed > there and not is_planned():
        raise BudgetError(
            f"{what} of {format_bytes(needed)} on the host, of which {format_bytes(there)} may be taken; {remedy}, or"
            " take a smaller model",
            needed,
            there,
        )


def _pin(slab: ctypes.Array[ctypes.c_char], device: torch.device) -> None:
    """Lock memory's pages until it is freed, or warn that this can't be done."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = ctypes.addressof(slab), len(slab)
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, size, 0))
        if not error:
            weakref.finalize(slab, _unpin, runtime, address, device).atexit = False
            return
        with contextlib.suppress(RuntimeError):  # the next kernel raises it once more
            torch.zeros(1, device=device)
    warnings.warn(
        f"{format_bytes(size)} of host memory could not be pinned (CUDA error {error}): copies to and from the"
        " device will wait for one another",
        stacklevel=3,
    )


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may be under way
    runtime.cudaHostUnregister(address)


class Staging:
    """A ring of buffers on a device through which pieces of host tensors pass.

    Args:
        device: where they are computed with.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        self.device = device
        self._streams: Any = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else None  # type: ignore[no-untyped-call]
        self._slots: list[_Slot] = []
        self._turn = 0
        self._served = 0
        self._largest = 1  # bytes of the pieces that came at once
        self._stored: dict[int, Any] = {}  # address of a piece -> when it was back

    def serve(self, size: int) -> None:
        """Have buffers for some more bytes of host tensors."""
        self._served += size

    @contextlib.contextmanager
    def on_device(
        self, pieces: Mapping[str, Tensor], *, unread: bool = False, unchanged: Collection[str] = ()
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the pieces on the device, for operators on the current stream; afterwards they go back.

        Args:
            pieces: contiguous host tensors; the same ones, or others that don't overlap them, each time.
            unread: they are written without being read.
            unchanged: names of those that needn't go back.
        """
        _, slot = self.next_slot(pieces)
        staged = {name: slot.buffers[name][: piece.nbytes].view(piece.dtype) for name, piece in pieces.items()}
        there = {} if unread else pieces
        back = {name: value for name, value in staged.items() if name not in unchanged}
        if self._streams is None:
            self._copy(there, staged)
            yield staged
            self._copy(back, pieces)
            return
        up, down = self._streams
        now = torch.cuda.current_stream(self.device)
        waits = [slot.emptied, *(self._stored.get(piece.data_ptr()) for piece in pieces.values())]
        with torch.cuda.stream(up):
            for event in filter(None, waits):
                up.wait_event(event)
            self._copy(there, staged)
        now.wait_stream(up)
        try:
            yield staged
            down.wait_stream(now)
            with torch.cuda.stream(down):
                self._copy(back, pieces)
        finally:
            down.wait_stream(now)
            slot.emptied = done = down.record_event()
            self._stored.update((pieces[name].data_ptr(), done) for name in back)

    def wait(self) -> None:
        """Wait until all pieces are back, before the host reads, writes or frees them."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def next_slot(self, pieces: Mapping[str, Tensor]) -> tuple[int, _Slot]:
        """Return the slot whose turn it is, with its number; its buffers are made larger where they are too small."""
        self._largest = max(self._largest, sum(piece.nbytes for piece in pieces.values()))
        least = SLOTS.get(self.device.type, 1)
        count = max(least, min(self._served // SERVED_PART, STAGING_BYTES) // self._largest) if least > 1 else least
        for slot in self._slots[count:]:
            self._free(slot, [*slot.buffers])
        del self._slots[count:]
        number = self._turn if self._turn < count else 0
        self._turn = number + 1
        if number == len(self._slots):
            self._slots.append(_Slot())
        slot = self._slots[number]
        for name, piece in pieces.items():
            if name not in slot.buffers or slot.buffers[name].numel() < piece.nbytes:
                self._free(slot, [name])
                slot.buffers[name] = torch.empty(piece.nbytes, dtype=torch.uint8, device=self.device)
                if self._streams is not None:  # its memory may have been somebody's who is still at work
                    self._streams[0].wait_stream(torch.cuda.current_stream(self.device))
        return number, slot

    def _free(self, slot: _Slot, names: Iterable[str]) -> None:
        """Give buffers back once what is under way to and from them is done."""
        for name in names:
            if name in slot.buffers and self._streams is not None:
                for stream in self._streams:
                    slot.buffers[name].record_stream(stream)
            slot.buffers.pop(name, None)

    def _copy(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        for name, source in sources.items():
            targets[name].copy_(source, non_blocking=self._streams is not None)


@dataclass
class _Slot:
    """Buffers by name, a storage each, for torch.compile knows no views of one by several types.

    Attributes:
        buffers: of bytes.
        emptied: when the last pieces were back.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    emptied: Any = None
