"""Tensors that lie in host memory and are computed with on the device: in slabs of exact size, and the way to and fro.

Torch's own pinned memory is rounded up to powers of two, 1.78 times of what is asked for where it was measured; a slab
is as large as what lies in it. `Staging` brings a piece of it to the device and back on streams of its own: while one
piece is computed with, the next ones come and those before go. The host runs ahead of the device, so what is asked for
there is under way long before the device needs it. On a CPU the same pieces are copied to and fro, without streams.
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
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
"""Staging buffers: on a GPU one is on its way there, one computed with, one on its way back."""


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
    if device.type == "cuda":
        memory.madvise(mmap.MADV_DONTFORK)  # else each data loader's worker would get a copy of what is pinned
        _pin(memory, device)
    made, at = [], 0
    for count, kind in wanted:
        whole = torch.frombuffer(memory, dtype=kind, count=count, offset=at) if count else torch.zeros(0, dtype=kind)
        made.append(whole)
        at += _aligned(count * kind.itemsize)
    return made


def _size(wanted: Wanted) -> int:
    return sum(_aligned(count * kind.itemsize) for count, kind in wanted)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_planned() -> bool:
    """Tell whether tensors are without data here: a plan counts bytes, and is judged by their sum."""
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


def _pin(memory: mmap.mmap, device: torch.device) -> None:
    """Lock memory's pages until it is freed, or warn that this can't be done."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, len(memory), 0))
        if not error:
            weakref.finalize(memory, _unpin, runtime, address).atexit = False
            return
        with contextlib.suppress(RuntimeError):  # the next kernel raises it once more
            torch.zeros(1, device=device)
    warnings.warn(
        f"{format_bytes(len(memory))} of host memory could not be pinned (CUDA error {error}): copies to and from the"
        " device will wait for one another",
        stacklevel=3,
    )


def _unpin(runtime: Any, address: int) -> None:
    torch.cuda.synchronize()  # copies may be under way
    runtime.cudaHostUnregister(address)


class Staging:
    """A ring of buffers on a device through which pieces of host tensors pass.

    Args:
        device: where they are computed with.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        self._device = device
        self._streams: Any = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else None  # type: ignore[no-untyped-call]
        # of each slot by name: a storage each, for torch.compile knows no views of one by several types
        self._buffers: list[dict[str, Tensor]] = [{} for _ in range(SLOTS.get(device.type, 1))]
        self._emptied: list[Any] = [None] * len(self._buffers)  # when each slot's last pieces were back
        self._stored: dict[int, Any] = {}  # address of a piece -> when it was back
        self._turn = 0

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
        slot, buffers = self.next_slot(pieces)
        staged = {name: buffers[name][: piece.nbytes].view(piece.dtype) for name, piece in pieces.items()}
        there = {} if unread else pieces
        back = {name: value for name, value in staged.items() if name not in unchanged}
        if self._streams is None:
            self._copy(there, staged)
            yield staged
            self._copy(back, pieces)
            return
        up, down = self._streams
        now = torch.cuda.current_stream(self._device)
        waits = [self._emptied[slot], *(self._stored.get(piece.data_ptr()) for piece in pieces.values())]
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
            self._emptied[slot] = done = down.record_event()
            self._stored.update((pieces[name].data_ptr(), done) for name in back)

    def wait(self) -> None:
        """Wait until all pieces are back, before the host reads, writes or frees them."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def next_slot(self, pieces: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
        """Return the slot whose turn it is, with its number; its buffers are made larger where they are too small."""
        slot, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        buffers = self._buffers[slot]
        for name, piece in pieces.items():
            if name not in buffers or buffers[name].numel() < piece.nbytes:
                self.wait()
                buffers.pop(name, None)
                buffers[name] = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
                if self._streams is not None:  # its memory may have been somebody's who is still at work
                    self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
        return slot, buffers

    def _copy(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        for name, source in sources.items():
            targets[name].copy_(source, non_blocking=self._streams is not None)
