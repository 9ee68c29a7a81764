"""Thinning keeps what a reader looks for: the least and the greatest value of every series, and the order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_solo.report.series import POINTS_PER_CHART, Series, peaks, thin, thin_together

VALUES = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=400)


@given(VALUES, st.integers(1, 50))
def test_least_greatest_first_and_last_are_kept(values: list[float], buckets: int) -> None:
    series = Series("loss", range(len(values)), values)
    kept = series.thinned(buckets)
    assert (min(kept.values), max(kept.values)) == (min(values), max(values))
    assert (kept.steps[0], kept.steps[-1]) == (0, len(values) - 1)
    assert list(kept.steps) == sorted(kept.steps)
    assert all(values[step] == value for step, value in zip(kept.steps, kept.values, strict=True))
    assert len(kept.values) <= 2 * buckets + 2


@given(VALUES, st.integers(1, 50))
def test_every_stretch_keeps_its_own_peak(values: list[float], buckets: int) -> None:
    kept = set(peaks(values, buckets))
    count = len(values)
    for bucket in range(buckets if count > 2 * buckets else 0):
        inside = range(count * bucket // buckets, count * (bucket + 1) // buckets)
        assert max(values[i] for i in inside) == max(values[i] for i in inside if i in kept)


def test_a_chart_of_many_series_is_bounded() -> None:
    many = [Series(f"#{n}", range(10_000), [float(i % 97) for i in range(10_000)]) for n in range(35)]
    points = sum(len(one.values) for one in thin(many))
    assert 1000 < points <= POINTS_PER_CHART + 2 * 35  # first and last of each


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=2000))
def test_stacked_series_share_steps_and_the_peak_of_their_sum_is_kept(pairs: list[tuple[int, int]]) -> None:
    both = [Series(name, range(len(pairs)), [pair[n] for pair in pairs]) for n, name in enumerate("ab")]
    kept = thin_together(both, points=60)
    assert list(kept[0].steps) == list(kept[1].steps)
    sums = [sum(values) for values in zip(*(one.values for one in kept), strict=True)]
    assert max(sums) == max(map(sum, pairs))
    assert [max(one.values) for one in kept] == [max(one.values) for one in both]


def test_stacked_series_keep_only_steps_that_all_have() -> None:
    kept = thin_together([Series("a", [1, 2, 3], [1.0, 2.0, 3.0]), Series("b", [2, 3, 3], [5.0, 6.0, 7.0])])
    assert [(list(one.steps), list(one.values)) for one in kept] == [([2, 3], [2.0, 3.0]), ([2, 3], [5.0, 7.0])]
    assert thin_together([]) == []
