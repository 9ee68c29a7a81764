"""Attributes that change while a loader is iterated over, such as a sampler's own count of epochs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_solo.data.splitting import is_plain
from lightning_solo.random_states import plain, raw

LARGEST = 2**20
"""Items of a longer container aren't looked at."""


class ChangingAttributes:
    """Attributes with plain data that have changed since this object was made.

    Others are left out, since they are arguments, of which a resumed run may have others.

    Args:
        samplers: their numbers, texts, tensors, arrays, lists, tuples and dicts; torch's own samplers have none.
        counting: other objects: their numbers and texts.

    >>> class Sampler: epoch = 0
    >>> here, there = Sampler(), Sampler()
    >>> attributes = ChangingAttributes([here]); here.epoch += 1
    >>> ChangingAttributes([there]).put(attributes.get()); there.epoch
    1
    """

    def __init__(self, samplers: Sequence[Any], counting: Sequence[Any] = ()) -> None:
        self._samplers = [each for each in samplers if not type(each).__module__.startswith("torch.")]
        self._counting = [*counting]
        self._first = dict(self._pickled())
        self._changed: set[str] = set()

    @property
    def _owners(self) -> list[Any]:
        return [*self._samplers, *self._counting]

    def _pickled(self) -> Iterator[tuple[str, bytes]]:
        for number, owner in enumerate(self._owners):
            for name, value in getattr(owner, "__dict__", {}).items():
                if type(value).__module__ == "numpy" and getattr(value, "ndim", 2) < 2 and value.size:
                    value = plain(value)
                scalar = isinstance(value, int | float | str | None)
                if (scalar or (number < len(self._samplers) and _size(value) <= LARGEST)) and is_plain(value):
                    yield f"{number}.{name}", pickle.dumps(value)

    def get(self) -> dict[str, Any]:
        """Return those that have changed, as plain data."""
        now = dict(self._pickled())
        self._changed |= {name for name, value in now.items() if self._first.get(name) != value}
        return {name: pickle.loads(now[name]) for name in sorted(self._changed & now.keys())}  # pickled here

    def put(self, saved: Mapping[str, Any]) -> None:
        """Set attributes to what `get` returned."""
        for path, value in saved.items():
            number, _, name = path.partition(".")
            if int(number) < len(self._owners):
                attributes = vars(self._owners[int(number)])
                now = attributes.get(name)
                if type(now) is list and type(value) is list:
                    now[:] = value  # others may hold it too
                else:
                    is_array = isinstance(value, dict) and value.keys() == {"dtype", "bytes"}
                    attributes[name] = raw(value) if is_array else value
                self._changed.add(path)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return len(value) if isinstance(value, list | tuple | dict) else 0
