"""The size of a micro-batch is learned from what fits and what doesn't."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_solo.data.micro_batch_size import GROW_AFTER, MicroBatchSize


def fit(size: MicroBatchSize, samples: int, steps: int) -> list[int | None]:
    """Return what is tried next after each of so many steps that fit."""
    return [size.fitted(samples) for _ in range(steps)]


def test_failures_halve_the_size() -> None:
    size = MicroBatchSize()
    assert size.current is None
    for samples, half in [(64, 32), (32, 16), (11, 5)]:  # the last ones were of 11: an even part
        size.failed(samples)
        assert size.current == half


def test_single_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="one sample"):
        MicroBatchSize().failed(1)


def test_size_that_never_failed_stays() -> None:
    size = MicroBatchSize()
    assert fit(size, 64, 2 * GROW_AFTER) == [None] * 2 * GROW_AFTER
    assert size.current is None


def test_middle_is_tried_after_steps_that_fit() -> None:
    size = MicroBatchSize()
    size.failed(64)
    size.failed(32)
    assert fit(size, 64, GROW_AFTER) == [*[None] * (GROW_AFTER - 1), 24]  # of 16 and 32
    assert size.current == 24
    assert fit(size, 64, GROW_AFTER)[-1] == 32  # of 24 and 32 it is 28, but that would again be 3 parts of 64


def test_failed_try_is_undone_and_doubles_the_wait() -> None:
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


def test_failure_restarts_the_wait() -> None:
    size = MicroBatchSize()
    size.failed(64)
    fit(size, 64, GROW_AFTER - 1)
    size.failed(32)
    assert set(fit(size, 64, GROW_AFTER - 1)) == {None}


def test_size_does_not_return_to_a_try_after_a_smaller_failure() -> None:
    size = MicroBatchSize()
    size.failed(64)
    size.failed(32)
    fit(size, 64, GROW_AFTER)
    size.failed(10)  # a batch of 10 long ones, where 16 of others had fitted
    assert size.current == 5


def test_smaller_batch_does_not_confirm_a_try() -> None:
    size = MicroBatchSize()
    size.failed(64)
    size.failed(32)
    fit(size, 64, GROW_AFTER)
    size.fitted(7)  # the last batch of an epoch
    size.failed(24)
    assert (size.current, size.wait) == (16, 2 * GROW_AFTER)


def test_failed_size_is_tried_again_if_none_is_in_between() -> None:
    size = MicroBatchSize()
    size.load({"micro_batch": 16, "too_large": 17, "wait": GROW_AFTER, "fitted_for": 0})
    assert fit(size, 64, GROW_AFTER)[-1] == 22  # 64 in 3 parts, not in 4


def test_undivided_batch_tries_no_size() -> None:
    size = MicroBatchSize()
    size.failed(64)
    assert set(fit(size, 20, 2 * GROW_AFTER)) == {None}
    assert size.fitted(64) == 64  # as soon as there is one that would gain


def test_failed_size_that_fits_later_is_doubled() -> None:
    size = MicroBatchSize()
    for samples in (64, 32, 16, 8, 4, 2):
        size.failed(samples)
    tries = [tried for tried in fit(size, 64, 10 * GROW_AFTER) if tried is not None]
    assert tries == [2, 4, 8, 16, 32, 64]


def test_maximum_is_never_exceeded() -> None:
    size = MicroBatchSize(24)
    assert size.current == 24
    assert set(fit(size, 64, GROW_AFTER)) == {None}
    size.failed(22)
    assert fit(size, 64, GROW_AFTER)[-1] == 16
    assert fit(size, 64, GROW_AFTER)[-1] == 22
    assert fit(size, 64, GROW_AFTER)[-1] == 24
    assert set(fit(size, 64, GROW_AFTER)) == {None}


def test_state_is_plain_data() -> None:
    size, other = MicroBatchSize(), MicroBatchSize()
    size.failed(64)
    fit(size, 64, 5)
    assert size.state() == {"micro_batch": 32, "too_large": 64, "wait": GROW_AFTER, "fitted_for": 5}
    other.load(size.state())
    assert vars(other) == vars(size)


def test_state_has_no_unfinished_try() -> None:
    size = MicroBatchSize()
    size.failed(64)
    fit(size, 64, GROW_AFTER)
    assert (size.current, size.state()["micro_batch"]) == (64, 32)


def test_maximum_limits_a_loaded_size() -> None:
    state = {"micro_batch": 16, "too_large": 32, "wait": 400, "fitted_for": 3}
    for most, now in [(8, 8), (16, 16), (24, 16), (None, 16)]:
        size = MicroBatchSize(most)
        size.load(state)
        assert size.current == now
    size = MicroBatchSize(8)
    size.load(MicroBatchSize().state())
    assert size.current == 8


@given(limit=st.integers(1, 40), samples=st.integers(1, 64), most=st.none() | st.integers(1, 40))
def test_size_converges_to_the_fewest_parts(limit: int, samples: int, most: int | None) -> None:
    """Whatever fits, no batch fails for ever, and after some tries there are as few parts as could be."""
    size = MicroBatchSize(most)

    def part() -> int:  # parts are even
        return -(-samples // -(-samples // min(size.current or samples, samples)))

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
