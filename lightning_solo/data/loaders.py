"""Copies of a DataLoader that batch items differently and can resume within an epoch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_solo.data.epoch_batches import EpochBatches
from lightning_solo.data.item_states import ItemStates
from lightning_solo.errors import CheckpointError, ConflictError


def require_own_batches(loader: Any, choice: str) -> None:
    """Check that a loader's batches can be replaced: it makes them itself, of all items of a map-style data set.

    Args:
        loader: of the training.
        choice: the option or function that replaces the batches, for the message.
    """
    if reason := _own_batches_missing(loader):
        removal = f"write ~{choice}" if choice.startswith("callback.") else f"leave {choice} out"
        raise ConflictError(f"{choice} and {reason}, or {removal}")


def _own_batches_missing(loader: Any) -> str | None:
    if not isinstance(loader, DataLoader):
        return f"a loader of type {type(loader).__name__}: return a torch.utils.data.DataLoader from train_dataloader"
    dataset, sampler, batch_sampler = loader.dataset, loader.sampler, loader.batch_sampler
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return (
            f"the iterable data set {type(dataset).__name__}, which fixes the items' order: give a map-style data set,"
            " with __getitem__ and __len__"
        )
    if not hasattr(dataset, "__len__"):
        return f"{type(dataset).__name__}, a data set without length: define __len__"
    if hasattr(loader, "state_dict"):
        return (
            f"{type(loader).__name__}, which stores its position in an epoch itself: give a"
            " torch.utils.data.DataLoader, whose position is stored here"
        )
    if batch_sampler is None:
        return (
            "DataLoader(batch_size=None), whose data set makes the batches: give a data set of single items and"
            " DataLoader(batch_size=...)"
        )
    if type(batch_sampler) is not BatchSampler:
        return (
            f"the batch sampler {type(batch_sampler).__name__}: both make the batches; write"
            " DataLoader(batch_size=...) instead"
        )
    every_item = type(sampler) in (SequentialSampler, DistributedSampler) or (
        type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset)
    )
    if not every_item:
        return (
            f"the sampler {type(sampler).__name__}, which chooses items: write DataLoader(shuffle=True), over a"
            " torch.utils.data.Subset to leave items out"
        )
    return None


def require_one_loader(loaders: Any, choice: str, instead: str) -> None:
    """Check that the Trainer has one training loader."""
    if isinstance(loaders, Mapping | Sequence):
        raise ConflictError(
            f"{choice} and several training loaders, a {type(loaders).__name__} of {len(loaders)}: return one loader"
            f" from train_dataloader, or {instead}"
        )


def processes_of(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return this process's rank and the number of processes among which a loader's sampler splits the items."""
    sampler = loader.sampler
    return (sampler.rank, sampler.num_replicas) if isinstance(sampler, DistributedSampler) else (0, 1)


def plain_batches(loader: DataLoader[Any], count: int, seed: int = 0) -> list[list[int]]:
    """Return a loader's usual batches of the first ``count`` items, in an order from the seed if it shuffles."""
    generator = torch.Generator().manual_seed(seed)
    sampler = loader.sampler
    ordered = type(sampler) is SequentialSampler or not getattr(sampler, "shuffle", True)
    order = torch.arange(count) if ordered else torch.randperm(count, generator=generator)
    batches = [batch.tolist() for batch in torch.split(order, loader.batch_size or 1)]
    return batches[:-1] if loader.drop_last and len(batches[-1]) != loader.batch_size else batches


class Resumable(DataLoader[Any]):
    """A loader that resumes within an epoch.

    Its state is the epoch, the number of batches returned in it, and the arguments of their order. Batches that
    workers have fetched ahead don't count.
    """

    _handed_out = (-1, 0)  # epoch of the last returned batch, and the batches returned in it
    _done = "batches_done"  # key of that number in a state
    _refused: dict[str, Any] | None = None  # a state that couldn't be loaded
    items: ItemStates | None = None
    """The random states of items and workers, if they are saved."""

    @property
    def _batches(self) -> Any:
        return self.batch_sampler

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the remaining batches of the current epoch."""
        self._refused = None
        return _Remaining(self)

    def _start(self, done: int) -> Iterator[Any]:
        """Return an iterator of the batches after the first ``done`` ones of the epoch."""
        iterate = super().__iter__
        return iterate() if self.items is None else self.items.start(iterate, done)

    @property
    def _place(self) -> tuple[int, int]:
        """The epoch of the next batch, and how many batches of that epoch have been returned."""
        batches = self._batches
        epoch, done = batches.epoch, batches.start
        if self._handed_out[0] == epoch:
            done = self._handed_out[1]
        return (epoch + 1, 0) if done == min(len(batches), batches.batches_used) else (epoch, done)

    def _go_to(self, epoch: int, done: int) -> None:
        self._batches.go_to(epoch, done)
        self._handed_out, self._refused = Resumable._handed_out, None

    def _order(self) -> dict[str, Any]:
        """Return the arguments, apart from the epoch, that determine the order of the batches."""
        batches = self._batches
        return {"kind": type(batches).__name__, "seed": batches.seed, "batches": len(batches)}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of batches returned in it, and the arguments of their order.

        After a refused `load_state_dict` it returns the refused state until a batch is drawn. So a checkpoint that
        ``ModelCheckpoint(save_on_exception=True)`` saves upon the refusal keeps that state.
        """
        if self._refused is not None:
            return self._refused
        epoch, done = self._place
        items = {} if self.items is None else {"items": [self.items.saved(1), self.items.saved()]}
        return {"epoch": epoch, self._done: done, **self._order(), **items}  # an optional "back": batches to repeat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position. At the start of an epoch, the saved run may have had other batches.

        Raises:
            CheckpointError: the state is of other batches, or has other keys.
        """
        self._refused = state_dict  # until it is accepted
        state_dict, order = {**state_dict}, self._order()
        items, back = state_dict.pop("items", None), state_dict.pop("back", 0)
        if set(state_dict) != (expected := {"epoch", self._done, *order}):
            raise CheckpointError(
                f"the loader's state in the checkpoint has {sorted(state_dict)}, where {sorted(expected)} are expected:"
                " resume with the same loader and technique, or load the weights alone"
            )
        epoch, done = state_dict["epoch"], state_dict[self._done]
        others = [
            f"{name}: {state_dict[name]!r} in the checkpoint, {here!r} here"
            for name, here in order.items()
            if state_dict[name] != here
        ]
        needs_past = self._batches.needs_past
        if others and (done or needs_past):
            raise CheckpointError(
                f"the checkpoint was saved with other batches ({'; '.join(others)}): resume with the same data set and"
                f" settings{', or load the weights alone' if needs_past else ', or from the end of an epoch'}"
            )
        # an older `TokenLoader` saved the end of an epoch, not the start of the next one
        self._go_to(*((epoch + 1, 0) if done == len(self) else (epoch, done)))
        for _ in range(back):
            self._batches.step_back()
        if self.items is not None and items is not None:
            cut = self._batches.batches_used < len(self)
            self.items.load(items[-1], within=self._batches.start > 0 or back > 0, cut=cut)


class _Remaining(Iterator[Any]):
    """The remaining batches of an epoch of a `Resumable`, from the position at which the first one is asked for."""

    def __init__(self, loader: Resumable) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._done = 0

    def __next__(self) -> Any:
        loader, items = self._loader, self._loader.items
        batches = loader._batches
        if items is not None:
            items.before_batch()
        if self._iterator is None:
            self._epoch, self._done = batches.epoch, batches.start
            self._iterator = loader._start(self._done)
            batches.start = 0
        try:
            batch = next(self._iterator)
        except StopIteration:
            batches.epoch = self._epoch + 1
            raise
        if items is not None:
            batch = items.after_batch(batch, order_draws=loader._handed_out[0] != self._epoch)
        self._done += 1
        loader._handed_out = self._epoch, self._done
        return batch


@functools.cache
def _resumable(cls: Any) -> Any:
    return type(cls.__name__, (Resumable, cls), {"__module__": cls.__module__})


def with_batches(loader: DataLoader[Any], batches: EpochBatches, **attributes: Any) -> Any:
    """Return a resumable copy of a loader with another batch sampler; the loader itself isn't changed.

    The copy is an instance of the loader's class and keeps its other attributes. No constructor runs.

    Args:
        loader: a loader that `require_own_batches` accepts.
        batches: the batch sampler.
        attributes: further attributes to replace, such as ``collate_fn``.
    """
    changed = copy.copy(loader)
    # bypass DataLoader.__setattr__, which refuses to replace a sampler; the loader's own iterators are not affected
    vars(changed).update(batch_sampler=batches, _iterator=None, **attributes)
    changed.__class__ = _resumable(type(loader))  # type: ignore[arg-type]
    return changed
