"""Copy host tensors through a device, piece by piece, on separate streams.

While the device computes with one piece, the next pieces arrive and earlier ones go back. The host runs ahead of the
device by as many pieces as there are buffers, so that the bus is busy while the device computes a long product. On a
CPU the same pieces are copied both ways without streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SLOTS = {"cpu": 1, "cuda": 3}
"""Least number of buffers: on a GPU one arrives, one is computed with, one goes back."""
SERVED_PART, STAGING_BYTES = 16, 2**29
"""On a GPU buffers take a sixteenth of the bytes that pass through them, up to 512 MiB."""


class Staging:
    """A ring of buffers on a device, through which pieces of host tensors pass.

    Attributes:
        least: number of buffers at least.
        served: bytes of all host tensors that pass through them.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        self.device = device
        self._streams: Any = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else None  # type: ignore[no-untyped-call]
        self.least = SLOTS.get(device.type, 1)
        self.served = 0
        self._slots: list[_Slot] = []
        self._turn = 0
        self._largest = 1  # bytes of the largest pieces so far
        self._stored: dict[int, Any] = {}  # address of a piece -> event of its copy back

    def serve(self, size: int) -> None:
        """Plan buffers for ``size`` more bytes of host tensors."""
        self.served += size

    @contextlib.contextmanager
    def on_device(
        self, pieces: Mapping[str, Tensor], *, unread: bool = False, unchanged: Collection[str] = ()
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the pieces on the device, for operators on the current stream; then copy them back.

        Args:
            pieces: contiguous host tensors; two pieces of different calls are the same piece or don't overlap.
            unread: whether the pieces are only written.
            unchanged: names of the pieces that aren't copied back.
        """
        _, slot = self.next_slot({name: piece.nbytes for name, piece in pieces.items()})
        staged = {name: slot.buffers[name][: piece.nbytes].view(piece.dtype) for name, piece in pieces.items()}
        read = {} if unread else pieces
        back = {name: value for name, value in staged.items() if name not in unchanged}
        if self._streams is None:
            self._copy(read, staged)
            yield staged
            self._copy(back, pieces)
            return
        up, down = self._streams
        now = torch.cuda.current_stream(self.device)
        waits = [slot.emptied, *(self._stored.get(piece.data_ptr()) for piece in pieces.values())]
        with torch.cuda.stream(up):
            for event in filter(None, waits):
                up.wait_event(event)
            self._copy(read, staged)
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
        """Wait until all pieces are copied back; call it before the host reads, writes or frees them."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def next_slot(self, pieces: Mapping[str, int]) -> tuple[int, _Slot]:
        """Return the next slot and its number; enlarge its buffers if pieces, by their bytes, need it."""
        self._largest = max(self._largest, sum(pieces.values()))
        count = self.least
        if count > 1:
            count = max(count, min(self.served // SERVED_PART, STAGING_BYTES) // self._largest)
        for slot in self._slots[count:]:
            self._free(slot, [*slot.buffers])
        del self._slots[count:]
        number = self._turn if self._turn < count else 0
        self._turn = number + 1
        if number == len(self._slots):
            self._slots.append(_Slot())
        slot = self._slots[number]
        for name, size in pieces.items():
            if name not in slot.buffers or slot.buffers[name].numel() < size:
                self._free(slot, [name])
                slot.buffers[name] = self._allocate(size)
        return number, slot

    def _allocate(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self._streams is not None:  # earlier work may still use its memory
            self._streams[0].wait_stream(torch.cuda.current_stream(self.device))
        return buffer

    def _free(self, slot: _Slot, names: Iterable[str]) -> None:
        """Free buffers once their copies are done."""
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
    """Buffers by name, each with its own storage: torch.compile can't view one storage as several types."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    emptied: Any = None
