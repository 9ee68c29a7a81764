"""Copies of any loader that resume within an epoch: its order is drawn again, and compared with the saved run's."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_solo.data.changing_attributes import ChangingAttributes
from lightning_solo.data.item_states import BEYOND_LIMIT, ItemStates
from lightning_solo.data.loaders import Resumable
from lightning_solo.data.replay import Replay, StatefulOrder, draws_at_once, unknown_order
from lightning_solo.data.worker_states import KEPT
from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.random_states import OwnSources

REPLAYED = "replayed"
"""A key of a state of `Replayed`, and of no other loader's."""


def _is_sized(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False


def _begun(record: Mapping[str, Any] | None, loader: Any) -> Mapping[str, Any] | None:
    """Return a record, or None if nothing was drawn and the iterator is made in the random states of that time."""
    return None if record and not record["drawn"] and not _is_sized(loader) else record


def is_stateful(thing: Any) -> bool:
    """Return whether an object saves its position itself, by ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


class _Order:
    """Takes a sampler's place, and keeps the position in it."""

    def __init__(self, loader: Replayed, sampler: Any) -> None:
        self.loader = loader
        self.sampler = sampler
        self.resumed: Mapping[str, Any] | None = None  # the position at which the next iterator begins
        self.latest: Replay | StatefulOrder | None = None
        self._reached: Mapping[str, Any] | None = None  # the position of the latest
        inner = getattr(sampler, "sampler", sampler)
        self.name = type(inner).__name__
        self.stateful = next((part for part in (sampler, inner) if is_stateful(part)), None)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        loader, resumed = self.loader, self.resumed
        if resumed is not None and resumed is self._reached and self.latest is not None:
            return self.latest  # a loader with workers makes two iterators, and uses the second one
        self._reached = resumed
        done = 0 if resumed is None else resumed["done"]
        if self.stateful is not None:
            if resumed is not None:
                load_order(self.stateful, resumed["order"])
            ahead = loader.num_workers * (loader.prefetch_factor or 0)
            self.latest = StatefulOrder(iter(self.sampler), self.stateful, done, ahead + KEPT)
        else:
            assert loader.items is not None
            make, record = functools.partial(iter, self.sampler), None if resumed is None else resumed["order"]
            once = draws_at_once(self.sampler)
            self.latest = Replay(make, loader.items.random, self.name, record, done, once=once)
        return self.latest


@dataclass
class _Position:
    """A position in an epoch."""

    done: int = 0  # batches that were returned
    ended: bool = False  # whether these are all of the epoch's batches
    order: Any = None  # the iterator with the order; None before the first epoch
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of samplers, from before the iterator was made
    # records of the positions before the latest batches
    before: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT - 1))


class Replayed(Resumable):
    """A loader that resumes within an epoch, whatever its sampler.

    Its batches, their order and the random numbers that it draws are those of the loader of which it is a copy. A
    resumed run draws the epoch's order again, from the random states of that time, and skips the batches that the saved
    run trained on; their items aren't loaded. Where there is no order to be drawn, as for an iterable data set, batches
    are loaded and dropped, if ``fast_forward`` allows it.

    Its state has the last positions, the newest last.
    """

    _fast_forward = _warned = False
    _batches_used: float = float("inf")
    _at: _Position
    _order_of_items: _Order
    _attributes: ChangingAttributes
    _to_resume: Mapping[str, Any] | None = None

    def prepare(self, fast_forward: bool, batches_used: float) -> None:
        """Begin at the start of an epoch.

        Args:
            fast_forward: whether batches may be loaded and dropped.
            batches_used: batches of an epoch that are used.
        """
        sampler = super()._index_sampler
        vars(self).update(
            _fast_forward=fast_forward, _batches_used=batches_used, _at=_Position(), _to_resume=None,
            items=ItemStates(self), _order_of_items=_Order(self, sampler),
        )  # fmt: skip
        counting = [] if self._has_order else [self.dataset, self]
        self._attributes = ChangingAttributes([sampler, getattr(sampler, "sampler", sampler)], counting)

    @property
    def _has_order(self) -> bool:
        """Whether the loader asks a sampler for each batch, and does nothing else."""
        own: Any = type(self).__bases__[1]
        return own.__iter__ is DataLoader.__iter__ and not isinstance(self.dataset, IterableDataset)

    @property
    def _index_sampler(self) -> Any:
        return self._order_of_items if self._has_order else super()._index_sampler

    @property
    def _saves_itself(self) -> bool:
        """Whether the data set saves its position."""
        return not self.num_workers and is_stateful(self.dataset)

    def __len__(self) -> int:
        return super(Resumable, self).__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the remaining batches of the epoch; the first one raises what prevents a position to be reached.

        Lightning would hide an error of this method by one of its own.
        """
        try:
            return self._remaining()
        except CheckpointError as error:
            return _raising(error)

    def _remaining(self) -> Iterator[Any]:
        resumed, self._to_resume = self._to_resume, None
        assert self.items is not None
        stateful = self._order_of_items.stateful is not None or self._saves_itself
        if resumed is not None and (resumed["ended"] or not stateful):
            self._attributes.put(resumed.get("attributes", {}))
        if resumed is not None and resumed["ended"]:
            self._at = _Position(resumed["done"], ended=True)
            return _Remaining(self, self._at, self.items.at_end())
        done = 0 if resumed is None else resumed["done"]
        self._at = position = _Position(done, attributes=self._attributes.get())
        record = None if resumed is None else resumed["order"]
        if self._has_order:
            order = self._order_of_items
            order.resumed = resumed
            iterator = self._start(done)
            order.resumed, position.order = None, order.latest
        elif self._saves_itself:
            if record is not None:
                load_order(self.dataset, record)
            iterate = super(Resumable, self).__iter__
            iterator = self.items.start(lambda: StatefulOrder(iterate(), self.dataset, done, KEPT), done)
            position.order = iterator
        else:
            iterate = super(Resumable, self).__iter__
            name = type(self.dataset).__name__
            record = _begun(record, self)
            position.order = iterator = Replay(iterate, self.items.random, name, record, done, digests=False)
        return _Remaining(self, position, iterator)

    def _record(self) -> dict[str, Any]:
        at = self._at
        assert self.items is not None
        ended = at.ended or at.done == self._batches_used or (self._is_sized and at.done == len(self))
        return {
            "done": at.done,
            "ended": ended,
            "order": {} if at.order is None else at.order.state(at.done),
            "attributes": self._attributes.get() if ended else at.attributes,
            "items": self.items.saved(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the positions before the latest batches, and after the last one."""
        at, items = self._at, self.items
        assert items is not None
        if self._to_resume is not None:  # not iterated since
            return {REPLAYED: [self._to_resume]}
        record = self._record()
        earlier = {**record, "ended": False, "attributes": at.attributes}
        count = len(at.before)
        before = [{**earlier, **each, "items": items.saved(count - n)} for n, each in enumerate(at.before)]
        return {REPLAYED: [*before, record]}

    @property
    def _is_sized(self) -> bool:
        return _is_sized(self)

    @property
    def _is_cut(self) -> bool:
        """Whether an epoch uses only a part of the batches."""
        return self._batches_used < (len(self) if self._is_sized else float("inf"))

    def warn_of_draws(self) -> None:
        """Warn once of random numbers that are drawn for batches beyond those that an epoch uses."""
        assert self.items is not None
        if self.persistent_workers and self.items.workers.draws and self._is_cut and not self._warned:
            self._warned = True
            warnings.warn(f"callback.exact_resume: a resume will be refused: {BEYOND_LIMIT}", stacklevel=2)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the newest position of a state.

        Raises:
            CheckpointError: the position can't be reached.
        """
        if set(state_dict) != {REPLAYED}:
            raise CheckpointError(
                f"the loader's state in the checkpoint has {sorted(state_dict)}, which is of another kind of loader:"
                " resume with the same loader and techniques, or load the weights alone"
            )
        record = state_dict[REPLAYED][-1]
        within = not record["ended"] and bool(record["order"])
        if within and record["done"] and not (self._has_order or self._saves_itself or self._fast_forward):
            what = type(self.dataset) if isinstance(self.dataset, IterableDataset) else type(self).__bases__[1]
            raise unknown_position(what, record["done"])
        assert self.items is not None
        self.items.load(record["items"], within=within, cut=self._is_cut)
        self._to_resume = record if within or record["ended"] else None


class _Remaining(Iterator[Any]):
    """The remaining batches of an epoch of a `Replayed` loader."""

    def __init__(self, loader: Replayed, position: _Position, iterator: Iterator[Any]) -> None:
        self._loader = loader
        self._position = position
        self._iterator = iterator

    def __next__(self) -> Any:
        position, items = self._position, self._loader.items
        assert items is not None
        if position.order is not None:
            position.before.append({"done": position.done, "order": position.order.state(position.done)})
        items.before_batch()
        try:
            batch = next(self._iterator)
        except StopIteration:
            position.ended = True
            items.without_batch()
            if position.order is not None:
                position.before.pop()
            raise
        if isinstance(self._iterator, Replay):  # a loader that is loaded again from its start
            position.done += 1
            return batch
        batch = items.after_batch(batch, order_draws=not position.done)
        position.done += 1
        self._loader.warn_of_draws()
        return batch


def load_order(owner: Any, record: Mapping[str, Any]) -> None:
    """Load a position into the sampler or data set that saved it.

    Raises:
        CheckpointError: what it saved has no position.
    """
    if record.get("constant"):
        raise unknown_order(owner)
    owner.load_state_dict(copy.deepcopy(record["sampler"]))


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def unknown_position(what: type[Any], done: int) -> CheckpointError:
    """Return the error for a position in an iterable of a class, after a number of batches."""
    return CheckpointError(
        f"the position in {what.__name__}, which determines the order itself, isn't known: write fast_forward=True"
        f" (callback.exact_resume.fast_forward=true) to load and drop its first {done} batches, give it state_dict and"
        " load_state_dict, or write ~callback.exact_resume to begin the epoch anew"
    )


class ReplayedIterable:
    """An iterable of batches that is no DataLoader, and resumes within an epoch by dropping the first batches.

    Other attributes are the iterable's. A sequence is resumed without ``fast_forward``.

    Args:
        loader: the iterable.
        fast_forward: whether batches may be loaded and dropped.
        batches_used: batches of an epoch that are used.
    """

    def __init__(self, loader: Any, fast_forward: bool, batches_used: float) -> None:
        self.loader = loader
        self._may_drop = fast_forward or isinstance(loader, Sequence)
        self._batches_used = batches_used
        self._done, self._ended = 0, False
        self._replay: Replay | None = None
        self._to_resume: Mapping[str, Any] | None = None
        self._attributes = ChangingAttributes([], [loader])
        self._at_start: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # during a copy, for example
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._to_resume = self._to_resume, None
        self._done = 0 if resumed is None else resumed["done"]
        self._ended = resumed is not None and resumed["ended"]
        if resumed is not None:
            self._attributes.put(resumed.get("attributes", {}))
        if self._ended:
            return iter(())
        self._at_start = self._attributes.get()
        record, random = None if resumed is None else resumed["order"], OwnSources(loader=self.loader)
        make, name = functools.partial(iter, self.loader), type(self.loader).__name__
        record = _begun(record, self.loader)
        self._replay = Replay(make, random, name, record, self._done, digests=False)
        return self._batches(self._replay)

    def _batches(self, replay: Replay) -> Iterator[Any]:
        for batch in replay:
            self._done += 1
            yield batch
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """Return the positions before the latest batches, and after the last one."""
        if self._to_resume is not None:  # not iterated since
            return {REPLAYED: [self._to_resume]}
        order = {} if self._replay is None else self._replay.state(self._done)
        done, ended = self._done, self._ended or self._done == self._batches_used
        attributes = self._attributes.get() if ended else self._at_start
        record = {"done": done, "ended": ended, "order": order, "attributes": attributes}
        before = [
            {"done": number, "ended": False, "order": {**order, "drawn": number}, "attributes": self._at_start}
            for number in range(max(0, done - KEPT + 1), done)
        ]
        return {REPLAYED: [*before, record]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the newest position of a state.

        Raises:
            CheckpointError: the position can't be reached.
        """
        record = state_dict[REPLAYED][-1]
        if record["done"] and not record["ended"] and not self._may_drop:
            raise unknown_position(type(self.loader), record["done"])
        self._to_resume = record if record["ended"] or record["order"] else None


@functools.cache
def _replayed(cls: Any) -> Any:
    return type(cls.__name__, (Replayed, cls), {"__module__": cls.__module__})


def replayed(loader: DataLoader[Any], *, fast_forward: bool, batches_used: float) -> Any:
    """Return a copy of a loader that resumes within an epoch; the loader itself isn't changed.

    Args:
        loader: any DataLoader without ``state_dict``.
        fast_forward: whether batches may be loaded and dropped to come to a position.
        batches_used: batches of an epoch that are used, if fewer than the loader has.

    Raises:
        ConflictError: the loader doesn't return batches in the order of the sampler.
    """
    cls: Any = type(loader)
    if issubclass(cls, Replayed):  # of an earlier fit
        cls = cls.__bases__[1]
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConflictError(
            f"callback.exact_resume and {cls.__name__}(in_order=False), whose batches come in another order in each"
            " run; write in_order=True, or ~callback.exact_resume"
        )
    changed: Any = copy.copy(loader)
    changed.__class__ = _replayed(cls)
    vars(changed)["_iterator"] = None
    changed.prepare(fast_forward, batches_used)
    return changed
