"""Replay a log of allocations: reserved bytes, and the smallest memory in which a run fits."""

from __future__ import annotations

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.allocator import (
    LARGE_ROUND,
    Block,
    CachingAllocator,
    DoesNotFitError,
    ExpandableAllocator,
    rounded,
)


def replay(
    log: EventLog, capacity: int | None = None, workspace: int = 0, *, expandable: bool = False
) -> CachingAllocator:
    """Return the allocator after it has run all events of a log.

    Args:
        log: of allocations and frees.
        capacity: bytes of the device.
        workspace: bytes that a library, such as cuBLAS, allocates and keeps.
        expandable: whether segments are expandable.

    Raises:
        DoesNotFitError: the capacity does not suffice.
    """
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(capacity)
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


def survives(log: EventLog, capacity: int, workspace: int = 0, *, expandable: bool = False) -> bool:
    """Return whether a log fits into a capacity in bytes."""
    try:
        replay(log, capacity, workspace, expandable=expandable)
    except DoesNotFitError:
        return False
    return True


def smallest_capacity(log: EventLog, workspace: int = 0, step: int = LARGE_ROUND, *, expandable: bool = False) -> int:
    """Return the smallest capacity, a multiple of ``step``, for a log: between peak allocated and reserved bytes."""
    low = peak_allocated(log, workspace) // step
    high = -(-replay(log, None, workspace, expandable=expandable).peak_reserved // step)
    while low < high:
        middle = (low + high) // 2
        if survives(log, middle * step, workspace, expandable=expandable):
            high = middle
        else:
            low = middle + 1
    return high * step
