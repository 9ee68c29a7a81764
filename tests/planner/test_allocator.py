"""The simulated caching allocator, against figures worked out by hand from its rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.allocator import CachingAllocator, DoesNotFitError, ExpandableAllocator
from lightning_solo.planner.replay import Capacities
from lightning_solo.units import MiB


def log_of(*events: tuple[int, int]) -> EventLog:
    storages = 1 + max((storage for storage, _ in events), default=-1)
    return EventLog(list(events), ["other"] * storages)


@pytest.mark.parametrize(
    ("sizes", "reserved_mib"),
    [
        ([1], 2),  # a small segment
        ([MiB, MiB], 2),  # two of 1 MiB share one
        ([MiB, MiB, 1], 4),
        ([MiB + 1], 20),  # above 1 MiB: from the large pool
        ([5 * MiB, 5 * MiB, 9 * MiB], 20),
        ([5 * MiB, 5 * MiB, 9 * MiB, 2 * MiB], 40),  # 1 MiB was left, which is no block of its own
        ([10 * MiB], 10),  # from 10 MiB on a segment of its own, in steps of 2
        ([11 * MiB], 12),
    ],
)
def test_segments(sizes: list[int], reserved_mib: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.reserved == reserved_mib * MiB


def test_freed_blocks_are_reused_by_best_fit_and_merged() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(6 * MiB) for _ in range(3))  # of one segment of 20 MiB
    allocator.release(first)
    allocator.release(third)
    assert allocator.allocate(7 * MiB) == third  # 8 MiB with the rest of the segment; the first has 6
    allocator.release(second)
    allocator.allocate(12 * MiB)  # the first and the second
    assert allocator.reserved == 20 * MiB


@pytest.mark.parametrize(("less", "splits"), [(MiB, False), (MiB + 512, True)])
def test_rest_of_a_large_block_is_split_off_only_above_1_mib(less: int, splits: bool) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(12 * MiB)
    allocator.release(block)
    again = allocator.allocate(12 * MiB - less)
    assert again.size == (12 * MiB - less if splits else 12 * MiB)
    assert (again.after is not None) == splits
    assert allocator.reserved == 12 * MiB


def test_unused_segments_are_released_before_out_of_memory() -> None:
    allocator = CachingAllocator(capacity=40 * MiB)
    allocator.release(allocator.allocate(30 * MiB))
    allocator.allocate(40 * MiB)
    assert (allocator.reserved, allocator.peak_reserved) == (40 * MiB, 40 * MiB)
    with pytest.raises(DoesNotFitError):
        allocator.allocate(1)


def test_fragmentation_needs_more_than_what_is_allocated() -> None:
    # 16 of 2 MiB in two segments of 20; every second one goes, then one of 12 finds no room in the gaps
    events = [(n, 2 * MiB) for n in range(16)] + [(n, -2 * MiB) for n in range(0, 16, 2)] + [(16, 12 * MiB)]
    log = log_of(*events)
    assert Capacities(log).peak_allocated == 32 * MiB
    assert Capacities(log).peak_reserved() == 52 * MiB
    assert Capacities(log).smallest() == 52 * MiB
    assert not Capacities(log).fits(50 * MiB)


def test_a_workspace_and_rounding_count() -> None:
    log = log_of((0, 1), (1, 513), (0, -1))
    assert Capacities(log).peak_allocated == 512 + 1024
    assert Capacities(log, workspace=100).peak_allocated == 512 + 512 + 1024


def test_another_stream_keeps_its_segments_to_itself() -> None:
    log = EventLog([(1, 512), (2, 3 * MiB)], ["other"] * 4, {0: 512, 3: 3 * MiB})
    assert Capacities(log).peak_reserved() == (2 + 20) * MiB
    assert Capacities(replace(log, aside=frozenset({0, 3}))).peak_reserved() == 2 * (2 + 20) * MiB
    assert Capacities(replace(log, aside=frozenset({3}))).smallest() == (2 + 20 + 20) * MiB


@pytest.mark.parametrize(
    ("sizes", "reserved_mib"),
    [
        ([1], 2),
        ([MiB, MiB, 1], 4),
        ([MiB + 1], 20),
        ([5 * MiB, 5 * MiB, 9 * MiB, 2 * MiB], 40),  # 21 MiB on two pages
        ([5 * MiB, 5 * MiB, 9 * MiB, MiB + 1], 40),
        ([11 * MiB, 9 * MiB], 20),  # two segments of 12 and 20 MiB without
        ([30 * MiB, 30 * MiB], 60),
    ],
)
def test_pages_of_an_expandable_segment(sizes: list[int], reserved_mib: int) -> None:
    allocator = ExpandableAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.reserved == reserved_mib * MiB


def test_expandable_segment_grows_at_its_end_by_the_missing_pages() -> None:
    allocator = ExpandableAllocator()
    allocator.allocate(10 * MiB)
    allocator.release(allocator.allocate(30 * MiB))
    allocator.allocate(50 * MiB)  # the free 30 MiB and 20 more, where ordinary segments would add 50
    assert allocator.reserved == 60 * MiB


def test_block_that_can_grow_is_used_last() -> None:
    allocator = ExpandableAllocator()
    first, *_ = (allocator.allocate(size * MiB) for size in (16, 4, 5))  # of two pages, with 15 MiB left
    allocator.release(first)
    assert allocator.allocate(14 * MiB).number == 0  # of the 16, though 15 fit better


def test_memory_that_is_still_used_is_not_merged_over() -> None:
    allocator = ExpandableAllocator()
    first, second, _ = (allocator.allocate(20 * MiB) for _ in range(3))
    allocator.release(second)
    allocator.allocate(40 * MiB)
    assert allocator.reserved == 100 * MiB
    allocator.release(first)
    assert allocator.allocate(40 * MiB) is first  # 20 and 20 of what were two blocks
    assert allocator.reserved == 100 * MiB


def test_free_pages_between_live_blocks_are_unmapped_before_out_of_memory() -> None:
    allocator = ExpandableAllocator(capacity=120 * MiB)
    blocks = [allocator.allocate(30 * MiB) for _ in range(4)]
    allocator.release(blocks[1])  # 30 to 60 MiB, of which 40 to 60 is a page
    with pytest.raises(DoesNotFitError):
        allocator.allocate(31 * MiB)
    assert allocator.reserved == 100 * MiB
    allocator.allocate(10 * MiB)  # the rest of its first page
    allocator.allocate(20 * MiB)  # the page again
    assert (allocator.reserved, allocator.peak_reserved) == (120 * MiB, 120 * MiB)


def test_expandable_segment_needs_less_where_a_small_block_keeps_a_large_segment() -> None:
    log = log_of((0, 60 * MiB), (0, -60 * MiB), (1, 2 * MiB), (2, 60 * MiB))
    assert Capacities(log).peak_allocated == 62 * MiB
    assert Capacities(log).smallest() == 120 * MiB  # 58 MiB of the first segment are too small
    assert Capacities(log, expandable=True).smallest() == 80 * MiB  # they grow by a page of 20
    assert not Capacities(log, expandable=True).fits(78 * MiB)


def test_another_stream_keeps_its_pages_to_itself() -> None:
    log = EventLog([(1, 512), (2, 3 * MiB)], ["other"] * 4, {0: 512, 3: 3 * MiB})
    assert Capacities(log, expandable=True).peak_reserved() == (2 + 20) * MiB
    aside = replace(log, aside=frozenset({0, 3}))
    assert Capacities(aside, expandable=True).peak_reserved() == 2 * (2 + 20) * MiB


LIFETIMES = st.lists(st.tuples(st.integers(1, 40 * MiB), st.integers(0, 30)), min_size=1, max_size=60)
"""Bytes of each storage, and how many storages later it is freed."""


def log_of_lifetimes(births: list[tuple[int, int]]) -> EventLog:
    events: list[tuple[int, int]] = []
    for index, (size, _) in enumerate(births):
        events += [(n, -births[n][0]) for n in range(index) if n + births[n][1] == index]
        events.append((index, size))
    return log_of(*events)


@settings(deadline=None, max_examples=60)
@given(LIFETIMES, st.booleans())
def test_smallest_capacity_is_between_allocated_and_reserved(births: list[tuple[int, int]], expandable: bool) -> None:
    log = log_of_lifetimes(births)
    allocated, reserved = Capacities(log).peak_allocated, Capacities(log, expandable=expandable).peak_reserved()
    capacity = Capacities(log, expandable=expandable).smallest()
    assert allocated <= capacity <= max(reserved, -(-allocated // (2 * MiB)) * 2 * MiB)
    assert Capacities(log, expandable=expandable).fits(capacity)
    assert not Capacities(log, expandable=expandable).fits(capacity - 2 * MiB)


@settings(deadline=None, max_examples=60)
@given(LIFETIMES, st.booleans())
def test_answers_from_earlier_replays_are_those_of_new_ones(births: list[tuple[int, int]], expandable: bool) -> None:
    log = log_of_lifetimes(births)
    known, most = Capacities(log, expandable=expandable), Capacities(log, expandable=expandable).peak_reserved()
    for capacity in [*range(0, most + 4 * MiB, 2 * MiB), most - 1, most, most + 1]:
        new = Capacities(log, expandable=expandable)
        assert known.fits(capacity) == new.fits(capacity)
        if new.fits(capacity):
            assert known.peak_reserved(capacity) == new.peak_reserved(capacity)


def test_one_replay_answers_for_capacities_with_which_the_allocator_does_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replays: list[int] = []
    replay = Capacities._replay
    monkeypatch.setattr(Capacities, "_replay", lambda self, one: (replays.append(one.capacity), replay(self, one))[1])
    # 12 of 2 GiB are freed before one of 25 GiB: between 25 and 49 GiB there are some ten steps of a bisection
    births = [(2048 * MiB, 12 - n) for n in range(12)]
    capacities = Capacities(log_of_lifetimes([*births, (25 * 1024 * MiB, 1)]))
    assert capacities.smallest() == 25 * 1024 * MiB
    assert len(replays) <= 3
    assert capacities.peak_reserved(40 * 1024 * MiB) <= 40 * 1024 * MiB
