"""Replay a log of allocations: reserved bytes, and the smallest memory in which a run fits."""

from __future__ import annotations

from functools import cached_property

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.allocator import (
    LARGE_ROUND,
    UNLIMITED,
    CachingAllocator,
    DoesNotFitError,
    ExpandableAllocator,
    rounded,
)


class Capacities:
    """The capacities that a log of allocations fits into.

    A replay with one capacity answers for all others with which the allocator does the same.

    Args:
        log: of allocations and frees.
        workspace: bytes that a library, such as cuBLAS, allocates and keeps.
        expandable: whether segments are expandable.
    """

    def __init__(self, log: EventLog, workspace: int = 0, *, expandable: bool = False) -> None:
        self._log, self._workspace = log, workspace
        self._blocks = _blocks(log)
        self._kind = ExpandableAllocator if expandable else CachingAllocator
        self._replays: list[tuple[int, int, bool]] = []  # bytes reserved, least that were refused, does the log fit?

    @cached_property
    def peak_allocated(self) -> int:
        """The peak of bytes in blocks, as ``torch.cuda.max_memory_allocated`` counts them."""
        sizes = {storage: rounded(size) for storage, size in self._log.held.items() if size}
        now = peak = (rounded(self._workspace) if self._workspace else 0) + sum(sizes.values())
        for storage, size in self._blocks:
            now += size - sizes.get(storage, 0)
            sizes[storage] = size
            if now > peak:
                peak = now
        return peak

    def fits(self, capacity: int) -> bool:
        """Return whether the log fits into a capacity in bytes."""
        return self.peak_allocated <= capacity and self._replayed(capacity)[1]

    def peak_reserved(self, capacity: int = UNLIMITED) -> int:
        """Return the most bytes that are reserved with a capacity.

        Raises:
            DoesNotFitError: the capacity does not suffice.
        """
        peak, fits = self._replayed(capacity)
        if not fits:
            raise DoesNotFitError
        return peak

    def smallest(self, step: int = LARGE_ROUND) -> int:
        """Return the smallest capacity that fits, a multiple of ``step``: between peak allocated and reserved bytes."""
        low = self.peak_allocated // step
        high = -(-self.peak_reserved() // step)
        while low < high:
            middle = (low + high) // 2
            if self.fits(middle * step):
                high = middle
            else:
                low = middle + 1
        return high * step

    def _replayed(self, capacity: int) -> tuple[int, bool]:
        """Return the most bytes reserved with a capacity until the log ends or doesn't fit, and whether it fits."""
        for peak, refused, fits in self._replays:
            if peak <= capacity < refused:
                return peak, fits
        allocator = self._kind(capacity)
        try:
            self._replay(allocator)
            fits = True
        except DoesNotFitError:
            fits = False
        self._replays.append((allocator.peak_reserved, allocator.least_refused, fits))
        return allocator.peak_reserved, fits

    def _replay(self, allocator: CachingAllocator) -> None:
        held, aside = self._log.held, self._log.aside
        blocks = {storage: allocator.allocate(held[storage]) for storage in sorted(aside) if held[storage]}
        allocator.serve_another_stream()
        if self._workspace:
            allocator.allocate(self._workspace)
        blocks |= {storage: allocator.allocate(size) for storage, size in held.items() if size and storage not in aside}
        for storage, size in self._blocks:
            if (block := blocks.pop(storage, None)) is not None:
                allocator.release(block)
            if size:
                blocks[storage] = allocator.allocate(size)


def _blocks(log: EventLog) -> list[tuple[int, int]]:
    """Return of each event the storage, and the bytes of its block after it; 0 if it has none."""
    sizes = dict(log.held)
    blocks = []
    for storage, change in log.events:
        sizes[storage] = size = sizes.get(storage, 0) + change
        blocks.append((storage, rounded(size) if size else 0))
    return blocks
