"""The size of a micro-batch is learned from what fits and what doesn't."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_solo.data.micro_batch_size import GROW_AFTER, MicroBatchSize


def fit(size: MicroBatchSize, samples: int, steps: int) -> list[int | None]:
    """Return what is tried next after each of so many steps that fit."""
    return [size.fitted(samples) for _ in range(steps)]


def test_it_halves_until_it_fits() -> None:
    size = MicroBatchSize()
    assert size.current is None
    for samples, half in [(64, 32), (32, 16), (11, 5)]:  # the last ones were of 11: an even part
        size.failed(samples)
        assert size.current == half


def test_a_single_sample_has_no_half() -> None:
    with pytest.raises(ValueError, match="one sample"):
        MicroBatchSize().failed(1)


def test_what_always_fitted_is_left() -> None:
    size = MicroBatchSize()
    assert fit(size, 64, 2 * GROW_AFTER) == [None] * 2 * GROW_AFTER
    assert size.current is None


def test_after_a_while_the_middle_is_tried() -> None:
    size = MicroBatchSize()
    size.failed(64)
    size.failed(32)
    assert fit(size, 64, GROW_AFTER) == [*[None] * (GROW_AFTER - 1), 24]  # of 16 and 32
    assert size.current == 24
    assert fit(size, 64, GROW_AFTER)[-1] == 32  # of 24 and 32 it is 28, but that would again be 3 parts of 64


def test_a_try_that_failed_is_taken_back_and_the_next_waits_twice_as_long() -> None:
    size = MicroBatchSize()
    size.failed(64)
    size.failed(32)
    for wait in (GROW_AFTER, 2 * GROW_AFTER, 4 * GROW_AFTER):
        tries = fit(size, 64, wait)
        assert tries[:-1] == [None] * (wait - 1)
        larger = tries[-1]
        assert larger is not None
        size.failed(larger)
        assert (size.current, size.too_large) == (16, larger)


def test_a_failure_starts_the_wait_again() -> None:
    size = MicroBatchSize()
    size.failed(64)
    fit(size, 64, GROW_AFTER - 1)
    size.failed(32)
    assert set(fit(size, 64, GROW_AFTER - 1)) == {None}


def test_a_try_below_which_a_smaller_batch_failed_is_not_returned_to() -> None:
    size = MicroBatchSize()
    size.failed(64)
    size.failed(32)
    fit(size, 64, GROW_AFTER)
    size.failed(10)  # a batch of 10 long ones, where 16 of others had fitted
    assert size.current == 5


def test_a_batch_smaller_than_a_try_does_not_prove_it() -> None:
    size = MicroBatchSize()
    size.failed(64)
    size.failed(32)
    fit(size, 64, GROW_AFTER)
    size.fitted(7)  # the last batch of an epoch
    size.failed(24)
    assert (size.current, size.wait) == (16, 2 * GROW_AFTER)


def test_at_the_edge_what_was_too_large_is_tried_again() -> None:
    size = MicroBatchSize()
    size.load({"micro_batch": 16, "too_large": 17, "wait": GROW_AFTER, "fitted_for": 0})
    assert fit(size, 64, GROW_AFTER)[-1] == 22  # 64 in 3 parts, not in 4


def test_a_batch_that_is_not_divided_tries_nothing() -> None:
    size = MicroBatchSize()
    size.failed(64)
    assert set(fit(size, 20, 2 * GROW_AFTER)) == {None}
    assert size.fitted(64) == 64  # as soon as there is one that would gain


def test_what_was_too_large_for_a_while_is_doubled_when_it_fits_again() -> None:
    size = MicroBatchSize()
    for samples in (64, 32, 16, 8, 4, 2):
        size.failed(samples)
    tries = [tried for tried in fit(size, 64, 10 * GROW_AFTER) if tried is not None]
    assert tries == [2, 4, 8, 16, 32, 64]


def test_most_is_never_exceeded() -> None:
    size = MicroBatchSize(24)
    assert size.current == 24
    assert set(fit(size, 64, GROW_AFTER)) == {None}
    size.failed(22)
    assert fit(size, 64, GROW_AFTER)[-1] == 16
    assert fit(size, 64, GROW_AFTER)[-1] == 22
    assert fit(size, 64, GROW_AFTER)[-1] == 24
    assert set(fit(size, 64, GROW_AFTER)) == {None}


def test_what_is_known_is_plain_data() -> None:
    size, other = MicroBatchSize(), MicroBatchSize()
    size.failed(64)
    fit(size, 64, 5)
    assert size.state() == {"micro_batch": 32, "too_large": 64, "wait": GROW_AFTER, "fitted_for": 5}
    other.load(size.state())
    assert vars(other) == vars(size)


def test_a_try_is_not_known() -> None:
    size = MicroBatchSize()
    size.failed(64)
    fit(size, 64, GROW_AFTER)
    assert (size.current, size.state()["micro_batch"]) == (64, 32)


def test_a_size_of_ones_own_is_stronger_than_what_is_loaded() -> None:
    state = {"micro_batch": 16, "too_large": 32, "wait": 400, "fitted_for": 3}
    for most, now in [(8, 8), (16, 16), (24, 16), (None, 16)]:
        size = MicroBatchSize(most)
        size.load(state)
        assert size.current == now
    size = MicroBatchSize(8)
    size.load(MicroBatchSize().state())
    assert size.current == 8


@given(limit=st.integers(1, 40), samples=st.integers(1, 64), most=st.none() | st.integers(1, 40))
def test_it_comes_to_the_fewest_parts_that_fit(limit: int, samples: int, most: int | None) -> None:
    """Whatever fits, no batch fails for ever, and after some tries there are as few parts as could be."""
    size = MicroBatchSize(most)

    def part() -> int:
        return min(size.current or samples, samples)

    failures = 0
    for _ in range(30 * GROW_AFTER):
        while part() > limit:
            size.failed(part())
            failures += 1
        size.fitted(samples)
        assert most is None or part() <= most
    fewest = -(-samples // min(limit, most or limit))
    assert -(-samples // part()) == fewest
    assert failures <= 6 + 6  # halvings of 64, and tries, each of which doubles the wait
