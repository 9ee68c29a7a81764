"""Copy host tensors through a device, piece by piece, on separate streams.

While the device computes with one piece, the next pieces arrive and earlier ones go back. The host runs ahead of the
device by as many pieces as there are buffers, so that the bus is busy while the device computes a long product. On a
CPU the same pieces are copied both ways without streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from lightning_solo.memory import host_slabs

SLOTS = {"cpu": 1, "cuda": 3}
"""Least number of buffers: on a GPU one arrives, one is computed with, one goes back."""
SERVED_PART, STAGING_BYTES = 16, 2**29
"""On a GPU buffers take a sixteenth of the bytes that pass through them, up to 512 MiB."""
_NEVER: tuple[int, Any] = (0, None)
"""Number and event of a copy back that hasn't been made."""


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
        self._returns = 0  # copies back so far, which are made in this order
        self._stored: dict[int, tuple[int, Any]] = {}  # address of a piece -> number and event of its copy back

    def serve(self, size: int) -> None:
        """Plan buffers for ``size`` more bytes of host tensors."""
        self.served += size

    @contextlib.contextmanager
    def on_device(
        self,
        pieces: Mapping[str, Tensor],
        *,
        unread: bool = False,
        unchanged: Collection[str] = (),
        packed: Tensor | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the pieces on the device, for operators on the current stream; then copy them back.

        Args:
            pieces: contiguous host tensors; two pieces of different calls are the same piece or don't overlap.
            unread: whether the pieces are only written.
            unchanged: names of the pieces that aren't copied back; they come last.
            packed: bytes of all other pieces, as `host_slabs.packed_tensors` returns them. They are copied at once.
        """
        _, slot = self.next_slot(host_slabs.packed_bytes(pieces.values()))
        staged = slot.placed(pieces)
        constant = [(staged[name], pieces[name]) for name in unchanged if name in pieces]
        changed = [(staged[name], piece) for name, piece in pieces.items() if name not in unchanged]
        if packed is not None:
            changed = [(slot.buffer[: packed.nbytes], packed)]
        read = [] if unread else [*changed, *constant]
        if self._streams is None:
            for buffer, piece in read:
                buffer.copy_(piece)
            yield staged
            for buffer, piece in changed:
                piece.copy_(buffer)
            return
        up, down = self._streams
        now = torch.cuda.current_stream(self.device)
        stored = [self._stored.get(piece.data_ptr(), _NEVER) for _, piece in (*changed, *constant)]
        with torch.cuda.stream(up):
            if last := max(slot.emptied, *stored)[1]:
                up.wait_event(last)
            for buffer, piece in read:
                buffer.copy_(piece, non_blocking=True)
        now.wait_stream(up)
        back = []
        try:
            yield staged
            back = changed
        finally:
            down.wait_stream(now)
            with torch.cuda.stream(down):
                for buffer, piece in back:
                    piece.copy_(buffer, non_blocking=True)
            self._returns += 1
            slot.emptied = self._returns, down.record_event()
            self._stored.update((piece.data_ptr(), slot.emptied) for _, piece in changed)

    def wait(self) -> None:
        """Wait until all pieces are copied back; call it before the host reads, writes or frees them."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def next_slot(self, size: int) -> tuple[int, _Slot]:
        """Return the next slot and its number; enlarge its buffer if ``size`` bytes need it."""
        self._largest = max(self._largest, size)
        count = self.least
        if count > 1:
            count = max(count, min(self.served // SERVED_PART, STAGING_BYTES) // self._largest)
        for slot in self._slots[count:]:
            self._free(slot)
        del self._slots[count:]
        number = self._turn if self._turn < count else 0
        self._turn = number + 1
        if number == len(self._slots):
            self._slots.append(_Slot())
        slot = self._slots[number]
        if slot.buffer is None or slot.buffer.numel() < size:
            self._free(slot)
            slot.buffer = self._allocate(size)
        return number, slot

    def _allocate(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self._streams is not None:  # earlier work may still use its memory
            self._streams[0].wait_stream(torch.cuda.current_stream(self.device))
        return buffer

    def _free(self, slot: _Slot) -> None:
        """Free a buffer once its copies are done."""
        if slot.buffer is not None and self._streams is not None:
            for stream in self._streams:
                slot.buffer.record_stream(stream)
        slot.buffer = None
        slot.views.clear()


class _Slot:
    """A buffer, and the views of it that pieces had so far.

    Attributes:
        emptied: number and event of the last copy from it.
    """

    def __init__(self) -> None:
        self.buffer: Any = None
        self.emptied = _NEVER
        self.views: dict[Any, dict[str, Tensor]] = {}

    def placed(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the places of pieces in the buffer."""
        key = tuple((name, piece.dtype, piece.numel()) for name, piece in pieces.items())
        if key not in self.views:
            flat = host_slabs.placed(self.buffer, list(pieces.values()))
            # each with a storage of its own: torch.compile can't view one storage as several types
            alone = [from_dlpack(to_dlpack(part)) for part in flat]
            self.views[key] = dict(zip(pieces, alone, strict=True))
        return self.views[key]
