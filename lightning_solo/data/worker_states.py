"""Random states of a loader's workers: sent with their batches, saved, and given to the workers of a resumed run."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lightning_solo.random_states import OwnSources, get_states, global_sources, put_states

KEPT = 3
"""Latest states of a worker that are kept: a checkpoint may be saved when Lightning has fetched a batch too many."""


class Shipped(NamedTuple):
    """A batch from a worker."""

    batch: Any  # as the user's ``collate_fn`` returned it
    worker: int  # the worker's number
    states: bytes  # its random states after the batch, pickled; empty if they are those after its last batch
    draws: bool  # whether they have changed since the worker's start


class Place(NamedTuple):
    """What a new worker continues: the number of an earlier worker, the base seed of all, and that one's states."""

    worker: int
    base_seed: int | None = None
    states: Mapping[str, Any] | None = None


_at_start: list[bytes] = []  # in a worker: its random states at its start


class Start:
    """A ``worker_init_fn`` that turns a worker into an earlier one, and then calls the user's.

    The worker has the earlier one's number and seed before the user's function runs, and its random states afterwards.
    """

    def __init__(self, worker_init_fn: Any, collate_fn: Any, places: list[Place]) -> None:
        self.worker_init_fn = worker_init_fn
        self.collate_fn = collate_fn
        self.places = places

    def __call__(self, worker: int) -> None:
        place = self.places[worker]
        if place.worker != worker or place.base_seed is not None:
            _become(place)
        if self.worker_init_fn is not None:
            self.worker_init_fn(place.worker)
        if place.states is not None:
            put_states(global_sources(), place.states["global"])
            _own_sources(self.collate_fn).put(place.states["own"], "the data set")
        _at_start[:] = [_states(self.collate_fn)]


def _become(place: Place) -> None:
    """Seed this worker as torch would seed the one of that number."""
    info = get_worker_info()
    assert info is not None
    base_seed = info.seed - info.id if place.base_seed is None else place.base_seed
    seed = base_seed + place.worker
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(torch_worker._generate_state(base_seed, place.worker))  # type: ignore[no-untyped-call]
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=place.worker, num_workers=info.num_workers, seed=seed, dataset=info.dataset
    )


def _own_sources(collate_fn: Any) -> OwnSources:
    info = get_worker_info()
    return OwnSources(dataset=None if info is None else info.dataset, collate_fn=collate_fn)


class Shipping:
    """A ``collate_fn`` that returns the user's batch with the worker's random states."""

    def __init__(self, collate_fn: Any) -> None:
        self.collate_fn = collate_fn
        self._last = b""

    def __call__(self, items: Any) -> Shipped:
        batch, info = self.collate_fn(items), get_worker_info()
        states = _states(self.collate_fn)
        unchanged, self._last = states == self._last, states
        return Shipped(batch, 0 if info is None else info.id, b"" if unchanged else states, [states] != _at_start)


def _states(collate_fn: Any) -> bytes:
    return pickle.dumps({"global": get_states(global_sources()), "own": _own_sources(collate_fn).get()})


class WorkerStates:
    """The random states of a loader's workers after the batches that were returned."""

    def __init__(self) -> None:
        self.base_seed: int | None = None
        self.draws = False  # whether any worker has drawn random numbers
        self._states: dict[int, deque[bytes]] = {}
        self._order: deque[int] = deque(maxlen=KEPT - 1)

    def take(self, shipped: Any) -> Any:
        """Return a worker's batch, and keep its states."""
        batch, worker, states, draws = shipped  # the thread that pins memory makes lists of tuples
        self.draws = self.draws or draws
        kept = self._states.setdefault(worker, deque(maxlen=KEPT))
        kept.append(states or kept[-1])
        self._order.append(worker)
        return batch

    def forget(self) -> None:
        """Forget the states: the workers end with the epoch."""
        self._states.clear()
        self._order.clear()
        self.base_seed = None

    def saved(self, back: int = 0) -> dict[str, Any]:
        """Return the states as plain data, before the last ``back`` returned batches."""
        later = [*self._order][len(self._order) - back :] if back else []
        states = {}
        for worker, kept in self._states.items():
            index = len(kept) - 1 - later.count(worker)
            if index >= 0:
                states[worker] = pickle.loads(kept[index])  # of this process's own workers
        return {"base_seed": self.base_seed, "states": states}

    def resumed(self, saved: Mapping[str, Any]) -> None:
        """Keep saved states, for the workers that start next and for the next checkpoint."""
        self.base_seed = saved["base_seed"]
        self._order.clear()
        self._states = {
            worker: deque([pickle.dumps(states)], maxlen=KEPT) for worker, states in saved["states"].items()
        }

    def places(self, count: int, first: int) -> list[Place]:
        """Return what each of ``count`` new workers continues, if the next batch is of worker ``first``."""
        if self.base_seed is None and not self._states:
            return [Place(number) for number in range(count)]
        numbers = [(first + number) % count for number in range(count)]
        states = {number: pickle.loads(kept[-1]) for number, kept in self._states.items()}
        return [Place(number, self.base_seed, states.get(number)) for number in numbers]

    @contextmanager
    def attached(self, loader: Any, first: int) -> Iterator[None]:
        """Let the workers that start in this context send their states, and continue those that are kept."""
        attributes = vars(loader)
        before = attributes["collate_fn"], attributes["worker_init_fn"]
        attributes["collate_fn"] = Shipping(before[0])
        attributes["worker_init_fn"] = Start(before[1], before[0], self.places(loader.num_workers, first))
        try:
            yield
        finally:
            attributes["collate_fn"], attributes["worker_init_fn"] = before
