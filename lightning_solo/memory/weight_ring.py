"""Blocks of trained weights in host memory, which pass through buffers on the device, and go back once updated.

A parameter stays the same object. Its numbers are, in ``.data``:

- between steps those on the host, so that whatever reads or loads them there finds the latest;
- in a step those in its block's buffer, while the block is there;
- in a step NaN on the device, while they aren't there: what reads a weight outside its block so gets no number of
  another block. On another device autograd would give the parameter another node for its gradients, and a block that
  is called twice would get two halves of one.

Updates may be postponed: each block takes its own when it next comes to the device, ahead of its use, while other
blocks are computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_solo.memory import host_slabs
from lightning_solo.memory.block_ring import BlockRing, _set_versions

_GONE = 2**20
"""Added to the versions of parameters that aren't in their buffer: autograd then refuses them."""


def refuses_absent(error: RuntimeError) -> bool:
    """Return whether autograd refuses a parameter that isn't in its buffer, or wasn't in forward, by its version."""
    return any(int(version) >= _GONE for version in re.findall(r"version (\d+)", str(error)))


class WeightRing(BlockRing):
    """A `BlockRing` of parameters, whose changes on the device it copies back to the host.

    While a block is updated, the one before goes back and the next ones come, each on a stream of its own direction.

    Args:
        blocks: parameters of each block; their ``.data`` becomes the copy on the host.
        device: on which they are used.
        window: number of buffers, at least 2.
        remedy: what to write where the host has no room.

    Attributes:
        stores, stored_bytes: blocks copied back to the host, and their bytes: what is trained, or was changed.
        flush: called before a block goes back; takes the steps that still wait for others.

    Raises:
        BudgetError: as `BlockRing`.

    >>> weights = [torch.nn.Parameter(torch.full((2,), float(n))) for n in range(4)]
    >>> ring = WeightRing([[weight] for weight in weights], torch.device("cpu"), window=2)
    >>> ring.begin()
    >>> with ring.using(0), torch.no_grad():
    ...     ring.update(weights[0]); _ = weights[0].add_(1)
    >>> ring.load(2); weights[0].isnan().all().item()  # another block has the buffer
    True
    >>> ring.rest(); weights[0].tolist()
    [1.0, 1.0]
    """

    def __init__(
        self, blocks: Sequence[Sequence[Tensor]], device: torch.device, window: int = 3, remedy: str = ""
    ) -> None:
        # what is trained first: it goes back in one piece
        super().__init__([sorted(each, key=lambda p: not p.requires_grad) for each in blocks], device, window, remedy)
        self.stores = self.stored_bytes = 0
        self.flush: Callable[[], None] = lambda: None
        self._numbers = {p: number for number, tensors in enumerate(self._sources) for p in tensors}
        self._home = [[p.data for p in tensors] for tensors in self._sources]
        self._there = [[part.data for part in parts] for parts in self._loaded]
        self._nan: dict[torch.dtype, Tensor] = {}
        # of copies to the host, and of updates that blocks wait for
        self._down: Any = None if self._stream is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side: Any = None if self._stream is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._shown: set[int] = set()  # blocks whose parameters have their numbers on the device
        self._away: dict[int, list[int]] = {}  # block whose parameters have none -> their versions before
        self._updated: set[int] = set()  # blocks that are to go back
        self._staying: set[int] = set()  # updated ones with buffers of their own, which go back in `rest`
        self._late: dict[int, Callable[[], None]] = {}  # block -> takes the update that it waits for
        self._taken: dict[int, Callable[[], None]] = {}  # those whose tensors its stream may still read
        self._is_in_step = False

    def begin(self) -> None:
        """Begin a step: from now on parameters are on the device, with numbers or without."""
        self._is_in_step = True
        self._order = (-1, -1)  # forward begins, whatever backward ended with
        self._forget()
        for number in range(len(self._sources)):
            if number not in self._shown and number not in self._away:
                self._take_over(number)
                self._go_away(number)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for their update of the step before."""
        return bool(self._late)

    def postpone(self, parameters: list[Tensor], step: Callable[[list[Tensor]], None]) -> list[Tensor]:
        """Let each block take its part of a step when it next comes; return the parameters of no block."""
        parts: dict[int | None, list[Tensor]] = {}
        for p in parameters:
            parts.setdefault(self._numbers.get(p), []).append(p)
        outside = parts.pop(None, [])
        self._late |= {number: partial(step, part) for number, part in parts.items() if number is not None}
        return outside

    def finish(self) -> None:
        """Take the updates that blocks still wait for."""
        for number in [*self._late]:
            self.load(number)

    def rest(self) -> None:
        """End a step: all numbers are on the host, and all parameters have those; waits for the copies."""
        self.finish()
        if self._side is not None:  # blocks that have not been used since their update
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        for number in {*self._shown, *self._away}:
            self._go_home(number)
        self._forget()
        self._is_in_step = False
        for stream in filter(None, (self._stream, self._down)):
            stream.synchronize()
        self._taken.clear()

    def leave_host(self) -> None:
        """Give all parameters their place on the device, which is full of NaN, for those who make states for them."""
        for buffer in self.buffers:
            buffer.fill_(0xFF)  # NaN in all types
        for number, tensors in enumerate(self._there):
            self._set(number, tensors)
            self._shown.add(number)

    def close(self) -> None:
        """Free the buffers, after the parameters have their numbers on the host."""
        if self._slots:
            self.flush = lambda: None  # steps that still wait are dropped
            self._late.clear()
            self.rest()
        super().close()
        self._there = []

    def keep_last(self, free: int) -> int:
        """Leave the last blocks on the device for good, as many as fit into ``free`` bytes; return their number.

        As many stay on the host as there are buffers. Call it between steps.
        """
        self.rest()
        count = len(self._stored)
        while len(self._stored) > len(self._slots) and self._stored[-1].nbytes <= free:
            free -= self._stored[-1].nbytes
            for p in self._sources[-1]:
                p.data = p.data.to(self.device)
                del self._numbers[p]
            self._written.pop(len(self._stored) - 1, None)
            for each in (self._stored, self._sources, self._loaded, self._home, self._there):
                each.pop()
        self._followers.clear()
        return count - len(self._stored)

    @contextmanager
    def using(self, number: int) -> Iterator[list[Tensor]]:
        """Give a block's parameters their numbers on the device; outside a step they are then on the host again."""
        with super().using(number) as tensors:
            yield tensors
        if not self._is_in_step and number not in self._running:
            is_newer = self._is_newer(number)
            self._go_home(number)
            if is_newer and self._down is not None:
                self._down.synchronize()  # the host may read them at once

    def load(self, number: int) -> None:
        """Give a block's parameters their numbers on the device; blocks that have been updated go back."""
        for other in self._updated - {number, *self._running}:
            self._store(other)
        super().load(number)
        self._taken.pop(number, None)
        if number not in self._shown:
            self._set(number, self._there[number])
            self._shown.add(number)

    def arrive(self, p: Tensor) -> None:
        """Load the block of a parameter whose gradient is there, unless it is loaded."""
        number = self._numbers.get(p)
        if number is not None and number not in self._shown:  # it comes after those of other blocks
            self.load(number)

    def update(self, p: Tensor) -> None:
        """Make ready for an update of a parameter on the current stream; its block then goes back to the host."""
        self.arrive(p)
        if p in self._numbers:
            self._change(self._numbers[p])

    def _change(self, number: int) -> None:
        slot = self._slot(number)
        if number not in self._updated and slot.emptied is not None:  # it is still read
            torch.cuda.current_stream(self.device).wait_event(slot.emptied)
        self._updated.add(number)

    def _forget(self) -> None:
        """Copy each block again at its next use: changes through ``.data`` between steps leave no trace."""
        for slot in self._slots:
            if slot.holds >= 0:
                self._leave(slot.holds)
                slot.holds = -1

    def _take_over(self, number: int) -> None:
        """Copy numbers to a block's place on the host that were set there as ``p.data = ...``."""
        for p, home in zip(self._sources[number], self._home[number], strict=True):
            if not torch._C._is_alias_of(p, home):  # type: ignore[attr-defined]
                home.copy_(p.data)
                p.data = home
                if self._slot(number).holds == number:
                    self._slot(number).holds = -1

    def _is_newer(self, number: int) -> bool:
        """Return whether an update or the block's own code has changed the numbers in its buffer since they came."""
        slot = self._slot(number)
        changed = number in self._shown and slot.holds == number and slot.versions != self._versions(number)
        return changed or number in self._updated or number in self._staying

    def _store(self, number: int) -> None:
        self.flush()
        self._updated.discard(number)
        self._staying.discard(number)
        slot, tensors = self._slot(number), self._sources[number]
        versions = zip(slot.versions, self._versions(number), strict=True)
        changed = [p.requires_grad or before != now for p, (before, now) in zip(tensors, versions, strict=True)]
        size = host_slabs.packed_bytes(tensors[: max((n for n, each in enumerate(changed, 1) if each), default=0)])
        self._copy_back(slot, number, size)
        slot.versions = self._versions(number)
        self.stores += 1
        self.stored_bytes += size

    def _copy_back(self, slot: Any, number: int, size: int) -> None:
        target, source = self._stored[number][:size], slot.buffer[:size]
        if self._down is None:
            target.copy_(source)
            return
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            slot.emptied = self._written[number] = self._down.record_event()

    def _bring(self, number: int, *, ahead: bool = False) -> None:
        if number not in self._shown and number not in self._away:
            self._take_over(number)
        if not self._is_newer(number):
            super()._bring(number, ahead=ahead)
        slot = self._slot(number)
        if number in self._late and slot.holds == number:
            self._take_late(slot, number)

    def _take_late(self, slot: Any, number: int) -> None:
        """Take the update that a block in its buffer waits for, while others are computed, and copy it back.

        A block with a buffer of its own goes back in `rest`.
        """
        if number not in self._shown:
            self._set(number, self._there[number])
        with self._beside(slot), torch.autocast(self.device.type, enabled=False):
            self._change(number)
            self._taken[number] = step = self._late.pop(number)
            step()
            if len(self._slots) < len(self._stored):
                self._store(number)
            else:
                self._updated.discard(number)
                self._staying.add(number)
        self._go_away(number)  # until the block is used

    @contextmanager
    def _beside(self, slot: Any) -> Iterator[None]:
        """Launch operators on a stream of their own, after those so far; the buffer's next use waits for them."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))  # which may still read the buffer
        with torch.cuda.stream(self._side):
            if slot.copied is not None:
                self._await_copy(slot)
            yield
            slot.copied = self._side.record_event()

    def _versions(self, number: int) -> list[int]:
        versions, before = super()._versions(number), self._away.get(number)
        if before is None:
            return versions
        return [old if new == old + _GONE else new for new, old in zip(versions, before, strict=True)]

    def _leave(self, number: int) -> None:
        if self._is_newer(number):
            self._store(number)
        if number in self._shown:
            self._go_away(number) if self._is_in_step else self._go_home(number)

    def _go_away(self, number: int) -> None:
        self._set(number, [self._absent(p) for p in self._sources[number]])
        before = super()._versions(number)
        _set_versions(tuple(self._sources[number]), tuple(version + _GONE for version in before))
        self._away[number] = before

    def _absent(self, p: Tensor) -> Tensor:
        """Return a tensor as a parameter, of one number."""
        if p.dtype not in self._nan:
            with torch.inference_mode(False):
                self._nan[p.dtype] = torch.full((), math.nan, dtype=p.dtype, device=self.device)
        return self._nan[p.dtype].expand(p.shape)

    def _go_home(self, number: int) -> None:
        if self._is_newer(number):
            self._store(number)
        self._set(number, self._home[number])

    def _set(self, number: int, data: Sequence[Tensor]) -> None:
        """Set the parameters' ``.data``, with the versions that they had before they went away."""
        _set_versions(tuple(self._sources[number]), tuple(self._versions(number)))
        self._away.pop(number, None)
        self._shown.discard(number)
        for p, each in zip(self._sources[number], data, strict=True):
            p.data = each
