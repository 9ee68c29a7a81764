"""Replay a log of allocations: reserved bytes, and the smallest memory in which a run fits."""

from __future__ import annotations

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.allocator import (
    LARGE_ROUND,
    UNLIMITED,
    Block,
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
        self._kind = ExpandableAllocator if expandable else CachingAllocator
        self._replays: list[tuple[int, int, bool]] = []  # bytes reserved, least that were refused, does the log fit?

    def fits(self, capacity: int) -> bool:
        """Return whether the log fits into a capacity in bytes."""
        return self._replayed(capacity)[1]

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
        low = peak_allocated(self._log, self._workspace) // step
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
        log = self._log
        blocks: dict[int, Block] = {}
        sizes: dict[int, int] = {}

        def resize(storage: int, size: int) -> None:
            if storage in blocks:
                allocator.release(blocks.pop(storage))
            if size:
                blocks[storage] = allocator.allocate(size)
            sizes[storage] = size

        for storage in sorted(log.aside):
            resize(storage, log.held[storage])
        allocator.serve_another_stream()
        if self._workspace:
            allocator.allocate(self._workspace)
        for storage, size in log.held.items():
            if storage not in log.aside:
                resize(storage, size)
        for storage, change in log.events:
            resize(storage, sizes.get(storage, 0) + change)


def peak_allocated(log: EventLog, workspace: int = 0) -> int:
    """Return the peak of bytes in blocks, as ``torch.cuda.max_memory_allocated`` counts them."""
    sizes = dict(log.held)
    now = peak = (rounded(workspace) if workspace else 0) + sum(rounded(size) for size in sizes.values() if size)
    for storage, change in log.events:
        before = sizes.get(storage, 0)
        sizes[storage] = after = before + change
        now += (rounded(after) if after else 0) - (rounded(before) if before else 0)
        peak = max(peak, now)
    return peak
