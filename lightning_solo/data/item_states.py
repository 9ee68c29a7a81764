"""Random states of the items and the order of a loader, as a checkpoint within an epoch needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_solo.attributes import replaced
from lightning_solo.data.worker_states import KEPT, WorkerStates
from lightning_solo.errors import CheckpointError
from lightning_solo.random_states import OwnSources, get_states, global_sources, same

LOOKS = 3
"""Batches after which items that drew no random numbers are taken to draw none."""

BEYOND_LIMIT = (
    "the workers of DataLoader(persistent_workers=True) have drawn random numbers for items that limit_train_batches"
    " left out, which a resumed run doesn't know; write persistent_workers=False"
)


class ItemStates:
    """States of the generators that a loader, its samplers, its data set and its workers hold.

    The global generators of this process are no part of it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.random = OwnSources(
            loader=_Holder(loader.generator),
            batch_sampler=loader.batch_sampler,
            sampler=loader.sampler,
            dataset=loader.dataset if not loader.num_workers else None,
            collate_fn=loader.collate_fn if not loader.num_workers else None,
        )
        self.workers = WorkerStates()
        self._before: deque[Any] = deque(maxlen=KEPT - 1)
        self._looks = 0
        self._draws = False
        self._resumed: Mapping[str, Any] | None = None
        self._rotated = False  # whether the workers' numbers differ from those of an undisturbed run

    def start(self, iterate: Callable[[], Iterator[Any]], done: int) -> Iterator[Any]:
        """Return ``iterate()``, an iterator of the loader, whose workers continue those of the saved run."""
        loader, saved = self._loader, self._resumed
        self._resumed = None
        if loader.num_workers:
            iterator = self._with_workers(iterate, done, saved)
        else:
            iterator = self._without_base_seed(iterate) if done else iterate()
        if saved is not None:
            self.random.put(saved["own"], type(loader).__name__)
        return iterator

    def _without_base_seed(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return ``iterate()``, without drawing the base seed, which the saved run has drawn."""
        with replaced(self._loader, "generator", torch.Generator()):
            return iterate()

    def _with_workers(
        self, iterate: Callable[[], Iterator[Any]], done: int, saved: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        loader = self._loader
        stay = loader.persistent_workers
        running = vars(loader).get("_iterator") if stay else None
        if running is not None and not self._rotated:
            return iterate()
        if running is not None:
            running._shutdown_workers()
            vars(loader)["_iterator"] = None
        elif saved is not None:
            self.workers.resumed(saved["workers"])
        elif not self._rotated:
            self.workers.forget()
        continues = self.workers.base_seed is not None
        first = done % loader.num_workers
        with self.workers.attached(loader, first):
            iterator = self._without_base_seed(iterate) if continues else iterate()
        if not continues:
            self.workers.base_seed = getattr(iterator, "_base_seed", None)  # none in an iterator of the user's class
        self._rotated = stay and first != 0
        return iterator

    def at_end(self) -> Iterator[Any]:
        """Return an iterator without batches, at the end of a saved epoch; workers that persist come with the next."""
        if self._resumed is not None:
            self.random.put(self._resumed["own"], type(self._loader).__name__)
            self._resumed = {**self._resumed, "own": {}}
        return iter(())

    def load(self, states: Mapping[str, Any], *, within: bool, cut: bool) -> None:
        """Continue with saved states when the next iterator starts.

        Args:
            states: of `saved`.
            within: whether the epoch's iterator had begun; its first batch may be still to come.
            cut: whether an epoch uses only a part of its batches.

        Raises:
            CheckpointError: items draw random numbers, and the saved run had another number of workers, or workers that
                persist have loaded more than an epoch uses.
        """
        loader, before = self._loader, states["num_workers"]
        if cut and loader.persistent_workers and states["draws"]:
            raise CheckpointError(f"{BEYOND_LIMIT} in the saved run too, or ~callback.exact_resume")
        if before != loader.num_workers and states["draws"] and (within or loader.persistent_workers):
            raise CheckpointError(
                f"the checkpoint was saved with DataLoader(num_workers={before}), here it is {loader.num_workers}, and"
                f" items draw random numbers, which each worker draws for itself; write num_workers={before}"
                f"{', or resume from the end of an epoch' if within else ''}"
            )
        if before != loader.num_workers:
            states = {**states, "own": {}}
        if before != loader.num_workers or not (within or loader.persistent_workers):  # new workers draw a new seed
            states = {**states, "workers": {"base_seed": None, "states": {}}}
        self._resumed = states

    def before_batch(self) -> None:
        """Keep the states before a batch is fetched."""
        self._before.append((self.random.get(), self._global() if self._looks < LOOKS else None))

    def without_batch(self) -> None:
        """Forget the states that were kept for a batch that there isn't."""
        self._before.pop()

    def after_batch(self, batch: Any, *, order_draws: bool) -> Any:
        """Return the batch that was fetched, without what its worker sent along.

        Args:
            batch: as the loader's iterator returned it.
            order_draws: whether the order of the items was drawn with this batch.
        """
        if self._loader.num_workers:
            return self.workers.take(batch)
        own, common = self._before[-1]
        if common is not None and not order_draws:
            self._looks += 1
            self._draws = self._draws or not same(common, self._global()) or not same(own, self.random.get())
        return batch

    def _global(self) -> dict[str, Any]:
        return get_states(global_sources())

    def saved(self, back: int = 0) -> dict[str, Any]:
        """Return the states as plain data, before the last ``back`` batches."""
        return {
            "own": self._before[-back][0] if 0 < back <= len(self._before) else self.random.get(),
            "num_workers": self._loader.num_workers,
            "draws": self._draws or self.workers.draws,
            "workers": self.workers.saved(back),
        }


class _Holder:
    """Holds the loader's own generator, apart from its other attributes."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
