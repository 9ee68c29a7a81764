"""A simulation of PyTorch's caching allocator: reserved bytes, and the smallest memory in which a run fits.

It follows the default policy of torch 2.13 (``c10/cuda/CUDACachingAllocator.cpp``), without expandable segments, for
one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from lightning_solo.memory.events import EventLog
from lightning_solo.units import MiB

ROUND = 512  # kMinBlockSize
SMALL = MiB  # kSmallSize: at most this comes from the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
MIDDLE = 10 * MiB  # kMinLargeAlloc: below it a large request takes a segment of
MIDDLE_SEGMENT = 20 * MiB  # kLargeBuffer
LARGE_ROUND = 2 * MiB  # kRoundLarge


class DoesNotFitError(Exception):
    """The capacity does not suffice."""


def rounded(size: int) -> int:
    """Return the bytes of the block for a request.

    >>> rounded(1), rounded(512), rounded(513)
    (512, 512, 1024)
    """
    return max(ROUND, -(-size // ROUND) * ROUND)


def segment_size(size: int) -> int:
    """Return the bytes requested from the driver for a block that fits in no cached segment.

    >>> [segment_size(mib * MiB) // MiB for mib in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if size <= SMALL:
        return SMALL_SEGMENT
    return MIDDLE_SEGMENT if size < MIDDLE else -(-size // LARGE_ROUND) * LARGE_ROUND


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, between its neighbours."""

    number: int
    segment: int
    size: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Splits segments into blocks by best fit, merges free neighbours, and releases unused segments before an OOM."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.peak_reserved = 0
        self._count = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # small?, (size, number, block)

    def allocate(self, size: int) -> Block:
        """Return a block of at least ``size`` bytes.

        Raises:
            DoesNotFitError: no room, even after unused segments are released.
        """
        size = rounded(size)
        small = size <= SMALL
        block = self._best_fit(size, small=small) or self._new_segment(size, small=small)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        return block

    def release(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._drop(other)
                block = self._join(*((other, block) if other is block.before else (block, other)))
        self._keep(block)

    def serve_another_stream(self) -> None:
        """Reserve free blocks for the stream that allocated them."""
        self._free = {True: [], False: []}

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        pool = self._free[small]
        index = bisect_left(pool, (size,))
        return pool.pop(index)[2] if index < len(pool) else None

    def _new_segment(self, size: int, *, small: bool) -> Block:
        segment = segment_size(size)
        if self.capacity is not None and self.reserved + segment > self.capacity:
            self._release_unused_segments()
            if self.reserved + segment > self.capacity:
                raise DoesNotFitError
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self._block(segment, segment, small=small)

    def _release_unused_segments(self) -> None:
        for pool in self._free.values():
            self.reserved -= sum(size for size, _, block in pool if block.segment == size)
            pool[:] = [(size, number, block) for size, number, block in pool if block.segment != size]

    def _block(self, segment: int, size: int, *, small: bool) -> Block:
        self._count += 1
        return Block(self._count, segment, size, small)

    def _split(self, block: Block, size: int) -> None:
        rest = self._block(block.segment, block.size - size, small=block.small)
        rest.before, rest.after, block.size = block, block.after, size
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        self._keep(rest)

    def _join(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        first.free = True
        return first

    def _keep(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.number, block))

    def _drop(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.number)))


def replay(log: EventLog, capacity: int | None = None, workspace: int = 0) -> CachingAllocator:
    """Return the allocator after it has run all events of a log.

    Args:
        log: of allocations and frees.
        capacity: bytes of the device.
        workspace: bytes that a library, such as cuBLAS, allocates and keeps.

    Raises:
        DoesNotFitError: the capacity does not suffice.
    """
    allocator = CachingAllocator(capacity)
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
    if workspace:
        allocator.allocate(workspace)
    for storage, size in log.held.items():
        if storage not in log.aside:
            resize(storage, size)
    for storage, change in log.events:
        resize(storage, sizes.get(storage, 0) + change)
    return allocator


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


def survives(log: EventLog, capacity: int, workspace: int = 0) -> bool:
    """Return whether a log fits into a capacity in bytes."""
    try:
        replay(log, capacity, workspace)
    except DoesNotFitError:
        return False
    return True


def smallest_capacity(log: EventLog, workspace: int = 0, step: int = LARGE_ROUND) -> int:
    """Return the smallest capacity, a multiple of ``step``, into which a log fits.

    It lies between the log's peaks of allocated and of reserved bytes.
    """
    low, high = peak_allocated(log, workspace) // step, -(-replay(log, None, workspace).peak_reserved // step)
    while low < high:
        middle = (low + high) // 2
        if survives(log, middle * step, workspace):
            high = middle
        else:
            low = middle + 1
    return high * step
