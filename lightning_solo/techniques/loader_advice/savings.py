"""Upper bounds of the seconds that each option of a loader would save, from the times measured in a fit without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch.utils.data import IterableDataset

from lightning_solo.data.item_cache import CachedItems
from lightning_solo.data.prefetch import Prefetcher
from lightning_solo.techniques.loader_advice.times import Times
from lightning_solo.units import format_seconds


@dataclass(frozen=True)
class Loading:
    """How a loader, or several together, loads."""

    workers: int | None = None  # the smallest ``num_workers`` of the loaders; None if no loader can have workers
    ahead: bool = False  # whether batches are loaded during earlier steps
    starts_workers: bool = False  # whether workers start with each epoch
    prefetched: bool = False  # whether the batches of all loaders are prefetched
    indexed: bool = False  # whether all loaders have map-style data sets, whose items `item_cache` can cache
    cached: bool = False  # whether the items of all loaders are cached

    @classmethod
    def of(cls, loader: Any) -> Loading:
        """Return how one loader loads."""
        workers, prefetched = getattr(loader, "num_workers", None), isinstance(loader, Prefetcher)
        starts = bool(workers) and not getattr(loader, "persistent_workers", False)
        dataset = getattr(loader, "dataset", None)
        indexed = workers is not None and hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        cached = isinstance(dataset, CachedItems)
        return cls(workers, prefetched or bool(workers), starts, prefetched, indexed, cached)

    def with_other(self, other: Loading) -> Loading:
        """Return how this loader and another one load together."""
        counts = [count for count in (self.workers, other.workers) if count is not None]
        return Loading(
            min(counts, default=None),
            self.ahead or other.ahead,
            self.starts_workers or other.starts_workers,
            self.prefetched and other.prefetched,
            self.indexed and other.indexed,
            self.cached and other.cached,
        )


@dataclass(frozen=True)
class Saving:
    """The saving of an option."""

    option: str  # ``num_workers``, ``pin_memory``, ``persistent_workers``, ``caching`` or ``prefetch``
    write: str  # code that sets the option
    seconds: float  # largest possible saving
    share: float  # share of ``seconds`` in the measured training time


def savings(times: Times, loading: Loading, *, cores: int, cuda: bool) -> list[Saving]:
    """Return the most that each option would save alone, the largest saving first.

    >>> times = Times(batches=100, total_s=6.0, wait_s=4.0, copy_s=0.0, load_s=4.0, collate_s=1.0)
    >>> [(saving.write, saving.seconds) for saving in savings(times, Loading(0, indexed=True), cores=8, cuda=False)]
    [('DataLoader(num_workers=2)', 4.0), ('+callback=item_cache (from epoch 2 on)', 3.0), ('solo.Prefetch()', 2.0)]
    """
    options: dict[str, tuple[str, float]] = {}
    if loading.workers is not None:
        workers, seconds = _more_workers(times, loading, cores)
        options["num_workers"] = f"DataLoader(num_workers={workers})", seconds
        options["pin_memory"] = "DataLoader(pin_memory=True)", times.copy_s if times.is_pageable else 0.0
    if loading.starts_workers:
        options["persistent_workers"] = "DataLoader(persistent_workers=True)", times.start_s + times.first_s
    # loading ahead is not measured, but the wait for it is at most the wait for batches
    items = times.wait_s + times.first_s if loading.ahead else min(times.wait_s, times.items_s)
    if not loading.cached:
        how = "+callback=item_cache" if loading.indexed else "caching items"
        options["caching"] = f"{how} (from epoch 2 on)", items
    if not loading.prefetched and (cuda or not loading.workers):
        # in parallel with the steps; during a validation the first batches after it are loaded too
        hidden = times.wait_s + (times.copy_s if cuda else 0.0)
        options["prefetch"] = "solo.Prefetch()", min(hidden, times.step_s + times.validation_s)
    every = [Saving(name, write, s, s / times.total_s) for name, (write, s) in options.items() if s > 0]
    return sorted(every, key=lambda saving: -saving.seconds)


def _more_workers(times: Times, loading: Loading, cores: int) -> tuple[int, float]:
    """Return the number of workers that keep up with the steps, at most one per core, and the most seconds saved."""
    present = loading.workers or 0
    if times.wait_s <= 0:
        return present, 0.0
    between = times.wait_s + times.copy_s + times.step_s
    # if training waits for batches that are loaded ahead, loading hardly pauses
    load = max(present, 1) * between if loading.ahead else times.load_s
    enough = ceil(load / max(between - times.wait_s, between / cores))
    workers = min(max(enough, present + 1), cores)
    if workers <= present:
        return workers, 0.0
    # between steps the workers load for at least their share of all loading
    return workers, times.wait_s if loading.ahead else min(times.wait_s, max(between - load / workers, 0.0))


def report(times: Times, advised: Sequence[Saving], min_share: float) -> str:
    """Return one sentence of advice, and its figures."""
    sentence = f"no option of the loader would save {min_share:.1%} of the time in training"
    if advised:
        first, *others = advised
        sentence = f"{first.write} would save at most {first.share:.0%} of the time in training"
        sentence += "".join(f", {other.write} at most {other.share:.0%}" for other in others)

    def each(seconds: float) -> str:
        return format_seconds(seconds / times.batches)

    loading = f" (items {each(times.items_s)}, collation {each(times.collate_s)})" if times.collate_s else ""
    start = f", start of workers {each(times.start_s + times.first_s)}" if times.start_s else ""
    return (
        f"loader_advice: {sentence}. Per batch, of {times.batches}: wait for data {each(times.wait_s)}{loading}{start},"
        f" copy {each(times.copy_s)}, step {each(times.step_s)}."
    )
