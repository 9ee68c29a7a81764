"""A measured quantity over steps, and how it is thinned without losing its peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

POINTS_PER_CHART = 3_200
"""Points of a chart, at most about: 4 series, and of each the least and greatest in 400 buckets."""
MOST_BUCKETS = 400


@dataclass(frozen=True)
class Series:
    """A quantity at each step where it was logged, finite values only."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    part: int = 0  # the fit, from 0, of a run that was resumed. No line joins two parts.
    left_out: int = 0  # number of values that are not finite, or not numbers

    def thinned(self, buckets: int) -> Series:
        """Return this series with at most ``2 * buckets + 2`` points, its least and greatest among them."""
        return self.at(peaks(self.values, buckets))

    def at(self, indices: Iterable[int]) -> Series:
        """Return the points at some indices."""
        kept = list(indices)
        steps, values = [self.steps[i] for i in kept], [self.values[i] for i in kept]
        return Series(self.name, steps, values, self.part, self.left_out)


def peaks(values: Sequence[float], buckets: int) -> list[int]:
    """Return the indices of the least and the greatest value in each bucket, and of the first and the last value.

    >>> peaks([0, 1, 9, 1, 0, -5, 0, 0], buckets=2)
    [0, 2, 4, 5, 7]
    >>> peaks([3, 1, 2], buckets=2)  # few enough
    [0, 1, 2]
    """
    count = len(values)
    if count <= 2 * buckets:
        return list(range(count))
    kept = {0, count - 1}
    for bucket in range(buckets):
        inside = range(count * bucket // buckets, count * (bucket + 1) // buckets)
        kept.add(min(inside, key=values.__getitem__))
        kept.add(max(inside, key=values.__getitem__))
    return sorted(kept)


def thin(series: Sequence[Series], points: int = POINTS_PER_CHART) -> list[Series]:
    """Return all series, thinned to about ``points`` points in total."""
    buckets = max(5, min(MOST_BUCKETS, points // (2 * max(1, len(series)))))
    return [one.thinned(buckets) for one in series]


def thin_together(series: Sequence[Series], points: int = POINTS_PER_CHART) -> list[Series]:
    """Return series thinned to the same steps, for stacking, with the peaks of each and of the sum.

    Steps at which a series has no value are left out.
    """
    if not series:
        return []
    common = set(series[0].steps).intersection(*(one.steps for one in series[1:]))
    aligned = [one.at(i for i, step in enumerate(one.steps) if step in common) for one in series]
    if len({tuple(one.steps) for one in aligned}) > 1:  # some logged a step twice and others once
        latest = [{step: i for i, step in enumerate(one.steps)} for one in aligned]
        aligned = [one.at(last[step] for step in sorted(last)) for one, last in zip(aligned, latest, strict=True)]
    total = [sum(column) for column in zip(*(one.values for one in aligned), strict=True)]
    buckets = max(5, min(MOST_BUCKETS, points // (2 * (len(aligned) + 1) * len(aligned))))
    kept = sorted({i for values in (total, *(one.values for one in aligned)) for i in peaks(values, buckets)})
    return [one.at(kept) for one in aligned]
