"""Iterators whose position is saved, and reached again by drawing the same values from the same random states."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_solo.errors import CheckpointError
from lightning_solo.random_states import OwnSources, get_states, global_sources, put_states, same

MAKING = -1
"""Number of the draw that makes the iterator."""
LARGEST = 1000
"""Random states of an epoch that a checkpoint may contain: 10 kB each."""
DRAWN_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw from shared generators with their first index at the latest."""


class Replay(Iterator[Any]):
    """An iterator that can be replayed, even if it draws from generators from which others draw in between.

    It keeps the random states before each draw that doesn't continue its previous one. To replay, it draws the same
    number of values from these states. A digest of the values shows whether they are the same.

    Args:
        make: returns the iterator.
        random: the generators from which it may draw, beside the global ones.
        name: of what is iterated over, for messages.
        record: of `state`, to continue at its position; None for the start.
        skip: first values of the record that aren't returned again.
        digests: whether the values are numbers that are compared.
        once: whether all random numbers are drawn with the first value.

    Raises:
        CheckpointError: other values were drawn than those of the record.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        random: OwnSources,
        name: str,
        record: Mapping[str, Any] | None = None,
        skip: int = 0,
        *,
        digests: bool = True,
        once: bool = False,
    ) -> None:
        self._random = random
        self._name = name
        self._digests = digests
        self._once = once
        self._digest = hashlib.blake2b(digest_size=16)
        self._states: dict[int, Any] = {} if record is None else dict(record["states"])
        self._after: Any = None
        self._pending: deque[Any] = deque()
        self.drawn = 0
        if record is None:
            self._iterator = self._draw(make)
        else:
            self._replay(make, record, skip)

    def _get(self) -> dict[str, Any]:
        return {"global": get_states(global_sources()), "own": self._random.get()}

    def _put(self, states: Mapping[str, Any]) -> None:
        put_states(global_sources(), states["global"])
        self._random.put(states["own"], self._name)

    def _draw(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``; keep the random states before it, if it draws and others have drawn since our last."""
        if self._once and self.drawn:
            return call()
        number = self.drawn if hasattr(self, "_iterator") else MAKING
        before = self._get()
        value = call()
        after = self._get()
        if not same(after, before):
            continues = self._after is not None and same(before, self._after)
            if not continues and len(self._states) <= LARGEST:
                self._states[number] = before
            self._after = after
        return value

    def _replay(self, make: Callable[[], Iterator[Any]], record: Mapping[str, Any], skip: int) -> None:
        if len(self._states) > LARGEST:
            raise CheckpointError(
                f"the position in {self._name} can't be reached again: it draws from the global random numbers at each"
                " batch, between the draws of others; give it a torch.Generator of its own, or state_dict and"
                " load_state_dict; or resume from the end of an epoch"
            )
        live = get_states(global_sources())
        try:
            self._put_at(MAKING)
            self._iterator = make()
            for number in range(record["drawn"]):
                self._put_at(number)
                value = self._next()
                if number >= skip:
                    self._pending.append(value)
            self._after = self._get()
        except StopIteration:
            raise self._other(record) from None
        finally:
            put_states(global_sources(), live)  # generators of its own stay where the replay has brought them
        if self._digests and self._digest.hexdigest() != record["digest"]:
            raise self._other(record)

    def _put_at(self, number: int) -> None:
        if number in self._states:
            self._put(self._states[number])

    def _other(self, record: Mapping[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"{self._name} doesn't return the same order again: its first {record['drawn']} batches differ from those"
            " that the saved run trained on. Resume with the same data set and arguments; if the order depends on a"
            " generator or count that isn't an attribute of it, make it one, or give it state_dict and load_state_dict"
            " with its position in the epoch; or write ~callback.exact_resume to begin the epoch anew"
        )

    def _next(self) -> Any:
        value = next(self._iterator)
        self.drawn += 1
        if self._digests:
            self._digest.update(repr(_numbers(value)).encode())
        return value

    def __next__(self) -> Any:
        return self._pending.popleft() if self._pending else self._draw(self._next)

    def state(self, count: int) -> dict[str, Any]:
        """Return the number of values drawn, the random states, and the digest of the values, as plain data.

        Args:
            count: of values that were used; others were drawn ahead.
        """
        return {"drawn": self.drawn, "states": {**self._states}, "digest": self._digest.hexdigest()}


class StatefulOrder(Iterator[Any]):
    """An iterator whose order a part with ``state_dict`` determines; that part's latest states are kept.

    Args:
        iterator: returns the values.
        owner: the part.
        count: values that have been returned before.
        kept: latest states that are kept.

    Raises:
        CheckpointError: a resumed order whose states have no position.
    """

    def __init__(self, iterator: Iterator[Any], owner: Any, count: int, kept: int) -> None:
        self._owner = owner
        self._iterator = iterator
        self._count = self._first = count
        self._constant = False  # whether the state is the same after two values
        self._states: deque[tuple[int, Any]] = deque([(count, deepcopy(owner.state_dict()))], maxlen=kept)

    def __next__(self) -> Any:
        value = next(self._iterator)
        self._count += 1
        state = deepcopy(self._owner.state_dict())
        if self._count == self._first + 2 and pickle.dumps(state) == pickle.dumps(self._states[-1][1]):
            if self._first:
                raise unknown_order(self._owner)
            self._constant = True
            warnings.warn(
                f"callback.exact_resume: within an epoch a resume will fail: {_without_position(self._owner)}",
                stacklevel=2,
            )
        self._states.append((self._count, state))
        return value

    def state(self, count: int) -> dict[str, Any]:
        """Return the part's state after ``count`` values."""
        return {"sampler": dict(self._states)[count], "constant": self._constant}


def unknown_order(owner: Any) -> CheckpointError:
    """Return the error for a part whose ``state_dict`` has no position."""
    return CheckpointError(f"{_without_position(owner)}, or write ~callback.exact_resume to begin the epoch anew")


def _without_position(owner: Any) -> str:
    name = type(owner).__name__
    return (
        f"the state_dict of {name} is the same after two batches, so it lacks the position in the epoch: add the number"
        " of values that were returned, and skip as many in the first __iter__ after load_state_dict"
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        return value.tolist()
    return [*map(_numbers, value)] if isinstance(value, list | tuple) else value


def draws_at_once(sampler: Any) -> bool:
    """Return whether all random numbers of an epoch are drawn with the first index: true of torch's samplers."""
    if type(sampler) is BatchSampler:
        return draws_at_once(sampler.sampler)
    return type(sampler) in DRAWN_AT_ONCE
