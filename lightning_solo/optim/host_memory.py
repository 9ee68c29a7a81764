"""Tensors that lie in host memory and are computed with on the device: one slab of exact size, and the way to and fro.

Torch's own pinned memory is rounded up to powers of two, 1.78 times of what is asked for where it was measured; a slab
is as large as what lies in it. `Staging` brings a piece of it to the device and back on streams of its own: while one
piece is computed with, the next ones come and those before go. The host runs ahead of the device, so what is asked for
there is under way long before the device needs it. On a CPU the same pieces are copied to and fro, without streams.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.errors import BudgetError
from lightning_solo.machine import host_memory
from lightning_solo.units import format_bytes

ALIGNMENT = 128
"""Bytes to which each tensor of a slab and of a staging buffer is aligned."""
SLOTS = {"cpu": 1, "cuda": 3}
"""Staging buffers: on a GPU one is on its way there, one computed with, one on its way back."""


def host_tensors(wanted: Sequence[tuple[int, torch.dtype]], device: torch.device) -> list[Tensor]:
    """Return flat tensors of zeros, all of them in one slab of host memory, pinned where the device is a GPU.

    Each has a storage of its own, so that it is saved without the others. The slab is freed with the last of them.

    Args:
        wanted: (elements, type) of each.
        device: that will read and write them.
    """
    starts, size = _places([count * kind.itemsize for count, kind in wanted])
    if isinstance(torch.empty(0), FakeTensor):  # a plan, which counts bytes
        return [torch.zeros(count, dtype=kind) for count, kind in wanted]
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)  # whose pages are taken as they are written
    first = -memory.ctypes.data % ALIGNMENT
    if device.type == "cuda" and size:
        _pin(memory, memory.nbytes)
    return [
        torch.frombuffer(memory, dtype=kind, count=count, offset=first + at) if count else torch.zeros(0, dtype=kind)
        for at, (count, kind) in zip(starts, wanted, strict=True)
    ]


def require_host_room(what: str, wanted: Sequence[tuple[int, torch.dtype]], remedy: str) -> None:
    """Check that the host has the memory that `host_tensors` would take, by the limits of its control groups too.

    Raises:
        BudgetError: it hasn't.
    """
    needed, there = _places([count * kind.itemsize for count, kind in wanted])[1], host_memory()[1]
    if needed > there and not isinstance(torch.empty(0), FakeTensor):  # a plan is judged by its sum
        raise BudgetError(
            f"{what} of {format_bytes(needed)} on the host, of which {format_bytes(there)} are available; {remedy}, or"
            " take a smaller model",
            needed,
            there,
        )


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each tensor begins, and where all of them end."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def _pin(memory: Any, size: int) -> None:
    """Lock a numpy array's pages until it is freed, or warn that the system doesn't allow it."""
    runtime, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, size, 0))
    if error:
        with contextlib.suppress(RuntimeError):  # the next kernel raises it once more
            torch.zeros(1, device="cuda")
        warnings.warn(
            f"{format_bytes(size)} of host memory could not be pinned (CUDA error {error}): copies to and from the"
            " device will wait for one another; raise the limit of locked memory (ulimit -l)",
            stacklevel=3,
        )
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


class Staging:
    """A ring of buffers on a device through which pieces of host tensors pass.

    Args:
        device: where they are computed with.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        self._device = device
        self._streams: Any = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else None  # type: ignore[no-untyped-call]
        self._buffers: list[Tensor | None] = [None] * SLOTS.get(device.type, 1)
        self._emptied: list[Any] = [None] * len(self._buffers)  # when each buffer's last pieces were back
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
        starts, size = _places([piece.nbytes for piece in pieces.values()])
        slot = self.next_slot(size)
        buffer = self._buffers[slot]
        assert buffer is not None  # there since it had its turn
        staged = {
            name: buffer[at : at + piece.nbytes].view(piece.dtype)
            for at, (name, piece) in zip(starts, pieces.items(), strict=True)
        }
        there = {} if unread else pieces
        back = {name: value for name, value in staged.items() if name not in unchanged}
        if self._streams is None:
            _copy(there, staged)
            yield staged
            _copy(back, pieces)
            return
        up, down = self._streams
        now = torch.cuda.current_stream(self._device)
        waits = [self._emptied[slot], *(self._stored.get(piece.data_ptr()) for piece in pieces.values())]
        with torch.cuda.stream(up):
            for event in filter(None, waits):
                up.wait_event(event)
            _copy(there, staged)
        now.wait_stream(up)
        yield staged
        down.wait_stream(now)
        with torch.cuda.stream(down):
            _copy(back, pieces)
        self._emptied[slot] = done = down.record_event()
        self._stored.update((pieces[name].data_ptr(), done) for name in back)

    def wait(self) -> None:
        """Wait until all pieces are back, before the host reads or writes them."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def next_slot(self, size: int) -> int:
        """Return the number of the buffer whose turn it is; made larger where so many bytes don't go into it."""
        slot, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < size:
            self.wait()
            self._buffers[slot] = torch.empty(size, dtype=torch.uint8, device=self._device)
            if self._streams is not None:  # its memory may have been somebody's who is still at work
                self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
        return slot


def _copy(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source, non_blocking=True)
