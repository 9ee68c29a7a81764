"""Nested batches: their leaves by path, a batch with other leaves, and the tensors in it.

Mappings, sequences, named tuples and dataclasses are nested. Tensors, sequences without any tensor, such as file names,
and all other values are leaves. A leaf's path joins keys, indices and field names by dots, as ``graph.nodes.0``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from torch import Tensor, nn

_ATOMS = (str, bytes, bytearray, range, int, float, NoneType, type)


def parts_of(thing: Any) -> dict[Any, Any]:
    """Return the parts of a mapping, sequence, named tuple or dataclass by key, index or field; empty for others."""
    if isinstance(thing, Mapping):
        return dict(thing.items())
    if isinstance(thing, Sequence) and not isinstance(thing, _ATOMS):
        return dict(enumerate(thing))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        names = [field.name for field in dataclasses.fields(thing)]
        return {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    return {}


def leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf of a batch, whose own path is ``path``.

    >>> [path for path, _ in leaves({"x": [Tensor(2), Tensor(3)], "names": ["a", "b"]})]
    ['x.0', 'x.1', 'names']
    """
    parts = _nested_parts(batch)
    if not parts:
        yield path, batch
    for name, part in parts.items():
        yield from leaves(part, f"{path}.{name}" if path else str(name))


def map_leaves(batch: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return the same nesting with each leaf replaced by ``function(path, leaf)``; the batch isn't changed.

    A mapping whose class can't be built from its items becomes a dict, and such a sequence becomes a list.
    """
    parts = _nested_parts(batch)
    if not parts:
        return function(path, batch)
    return _like(
        batch,
        {name: map_leaves(part, function, f"{path}.{name}" if path else str(name)) for name, part in parts.items()},
    )


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the same nesting with each tensor replaced by ``function(tensor)``."""
    return map_leaves(batch, lambda _, leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def tensors_of(thing: Any) -> Iterator[Tensor]:
    """Yield each tensor of a batch once, also those in attributes of objects, such as graphs, but not of modules.

    Cycles are allowed.

    >>> [tuple(tensor.shape) for tensor in tensors_of({"x": Tensor(2, 3), "label": [Tensor(2), "a"]})]
    [(2, 3), (2,)]
    """
    seen: dict[int, Any] = {}  # holds each value, so that no other one gets its id
    ahead = [thing]
    while ahead:
        value = ahead.pop()
        if id(value) in seen or isinstance(value, (*_ATOMS, nn.Module)):
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield value
            continue
        slots = [getattr(value, name, None) for cls in type(value).__mro__ for name in _slots(cls)]
        ahead += reversed([*parts_of(value).values(), *slots, *getattr(value, "__dict__", {}).values()])


def item_of(batch: Any, name: str) -> Any:
    """Return the item or attribute of this name, or None."""
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def _nested_parts(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, Tensor) or (isinstance(thing, Sequence) and next(tensors_of(thing), None) is None):
        return {}
    return parts_of(thing)


def _like(thing: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of ``thing`` with these parts."""
    if isinstance(thing, dict | UserDict):  # their shallow copies have their own items
        like: Any = copy.copy(thing)
        for name, part in parts.items():
            like[name] = part
        return like
    if hasattr(thing, "_fields"):
        return type(thing)(*parts.values())
    if isinstance(thing, Mapping | Sequence):
        plain: Any = parts if isinstance(thing, Mapping) else list(parts.values())
        try:
            return type(thing)(plain)  # type: ignore[call-arg]
        except TypeError:  # its constructor takes other arguments
            return plain
    like = copy.copy(thing)
    for name, part in parts.items():
        object.__setattr__(like, name, part)  # of frozen ones too
    return like


def _slots(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
