"""A simulation of PyTorch's caching allocator, for one stream, with ordinary and with expandable segments.

It follows torch 2.13 (``c10/cuda/CUDACachingAllocator.cpp``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from lightning_solo.units import MiB

ROUND = 512  # kMinBlockSize
SMALL = MiB  # kSmallSize: at most this comes from the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
MIDDLE = 10 * MiB  # kMinLargeAlloc: below it a large request takes a segment of
MIDDLE_SEGMENT = 20 * MiB  # kLargeBuffer
LARGE_ROUND = 2 * MiB  # kRoundLarge
PAGES = {True: SMALL_SEGMENT, False: MIDDLE_SEGMENT}  # small? -> bytes by which an expandable segment grows
ADDRESSES = 2**62  # of an expandable segment; torch makes another one after 9/8 of the device's memory
UNLIMITED = 2**63  # a capacity above the bytes of any device


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
    mapped: bool = True  # only an expandable segment has unmapped blocks, which are not free


class CachingAllocator:
    """Splits segments into blocks by best fit, merges free neighbours, and releases unused segments before an OOM.

    Attributes:
        capacity: bytes of the device.
        reserved: bytes of all segments.
        peak_reserved: the most that were reserved.
        least_refused: the least bytes that were asked for in all, and exceeded the capacity. With any capacity from
            ``peak_reserved`` to below this, the allocator does the same.
    """

    least_rest = SMALL + ROUND  # bytes from which the rest of a large block is split off

    def __init__(self, capacity: int = UNLIMITED) -> None:
        self.capacity = capacity
        self.reserved = self.peak_reserved = 0
        self.least_refused = UNLIMITED + 1
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
        if block.size - size >= (ROUND if small else self.least_rest):
            self._split(block, size)
        block.free = False
        return block

    def release(self, block: Block) -> Block:
        """Free a block, merge it with free neighbours, and return the merged block."""
        block.free = True
        if (before := block.before) is not None and before.free:
            self._drop(before)
            block = self._join(before, block)
        if (after := block.after) is not None and after.free:
            self._drop(after)
            block = self._join(block, after)
        self._keep(block)
        return block

    def serve_another_stream(self) -> None:
        """Reserve free blocks for the stream that allocated them."""
        self._free = {True: [], False: []}

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        pool = self._free[small]
        index = bisect_left(pool, (size,))
        return pool.pop(index)[2] if index < len(pool) else None

    def _new_segment(self, size: int, *, small: bool) -> Block:
        segment = segment_size(size)
        if not self._reserve(segment):
            self._release_unused_segments()
            if not self._reserve(segment):
                raise DoesNotFitError
        self._count += 1
        return Block(self._count, segment, segment, small)

    def _reserve(self, size: int) -> bool:
        """Reserve bytes if they fit, and return whether they do."""
        reserved = self.reserved + size
        if reserved > self.capacity:
            self.least_refused = min(self.least_refused, reserved)
            return False
        self.reserved = reserved
        self.peak_reserved = max(self.peak_reserved, reserved)
        return True

    def _release_unused_segments(self) -> None:
        for pool in self._free.values():
            self.reserved -= sum(size for size, _, block in pool if block.segment == size)
            pool[:] = [(size, number, block) for size, number, block in pool if block.segment != size]

    def _split(self, block: Block, size: int) -> Block:
        """Return the rest of a block that keeps ``size`` bytes; the rest is free."""
        after, number = block.after, self._number_of_rest(block, size)
        rest = Block(number, block.segment, block.size - size, block.small, before=block, after=after)
        if after is not None:
            after.before = rest
        block.after, block.size = rest, size
        self._keep(rest)
        return rest

    def _number_of_rest(self, block: Block, size: int) -> int:
        self._count += 1
        return self._count

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


class ExpandableAllocator(CachingAllocator):
    """One segment per pool, whose pages are mapped where they are needed: ``expandable_segments:True``.

    Free memory is one block across pages, so a request that fits in no gap needs only the missing pages. Here the
    ``segment`` of a block is the bytes of a page, and its ``number`` its address.
    """

    least_rest = ROUND

    def __init__(self, capacity: int = UNLIMITED) -> None:
        super().__init__(capacity)
        self.serve_another_stream()

    def serve_another_stream(self) -> None:
        """Begin new segments."""
        super().serve_another_stream()
        self._unmapped = {
            small: [Block(0, page, ADDRESSES, small, free=False, mapped=False)] for small, page in PAGES.items()
        }

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        pool = self._free[small]
        index = bisect_left(pool, (size,))
        # a block that can grow is taken last
        while index + 1 < len(pool) and _extent(pool[index + 1][2]) < _extent(pool[index][2]):
            index += 1
        return pool.pop(index)[2] if index < len(pool) else None

    def _new_segment(self, size: int, *, small: bool) -> Block:
        block = self._grow(size, small=small)
        if block is None:
            self._release_unused_segments()
            block = self._grow(size, small=small)
        if block is None:
            raise DoesNotFitError
        self._drop(block)
        return block

    def _grow(self, size: int, *, small: bool) -> Block | None:
        """Return a free block of at least ``size`` bytes at the first place with room; None if the pages don't fit."""
        for unmapped in sorted(self._unmapped[small], key=lambda block: block.number):
            before = unmapped.before
            block: Block | None = before if before is not None and before.free else unmapped
            if _room(block) >= size:
                break
        while block is not None and not (block.mapped and block.size >= size):
            block = self._map(block, size) if not block.mapped else self._map(block.after, size - block.size)
        return block

    def _map(self, block: Block | None, size: int) -> Block | None:
        """Map pages at the start of an unmapped block, and return it merged with free neighbours; None without room."""
        assert block is not None
        size = -(-min(size, block.size) // block.segment) * block.segment
        if not self._reserve(size):
            return None
        self._unmapped[block.small].remove(block)
        if size < block.size:
            rest = self._split(block, size)
            self._drop(rest)
            rest.free = rest.mapped = False
            self._unmapped[block.small].append(rest)
        block.mapped = True
        return self.release(block)

    def _release_unused_segments(self) -> None:
        """Unmap all pages in which nothing is allocated."""
        for block in [block for pool in self._free.values() for _, _, block in pool]:
            page, end = block.segment, (block.number + block.size) // block.segment * block.segment
            begin = -(-block.number // page) * page
            if begin >= end:
                continue
            self._drop(block)
            if end < block.number + block.size:
                self._split(block, end - block.number)
            if begin > block.number:
                front, block = block, self._split(block, begin - block.number)
                self._drop(block)
                self._keep(front)
            self.reserved -= block.size
            block.mapped = False
            for other in (block.before, block.after):
                if other is not None and not other.mapped:
                    self._unmapped[block.small].remove(other)
                    block = self._join(*((other, block) if other is block.before else (block, other)))
            block.free = False
            self._unmapped[block.small].append(block)

    def _number_of_rest(self, block: Block, size: int) -> int:
        return block.number + size


def _extent(block: Block) -> int:
    """Return the bytes of a block with the unmapped ones after it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room(block: Block | None) -> int:
    """Return the free and unmapped bytes from a block on."""
    room = 0
    while block is not None and (block.free or not block.mapped):
        room, block = room + block.size, block.after
    return room
