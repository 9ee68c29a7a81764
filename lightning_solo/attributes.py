"""Replace an attribute of an object, class or module, or a global setting, within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NONE: Any = object()  # an attribute that the object itself doesn't have


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute within a context, and yield the original.

    If other code replaces the attribute in the meantime, its value is kept.

    Raises:
        AttributeError: the object has no such attribute, for example in another version of its library.
    """
    original, own = getattr(owner, name), vars(owner).get(name, _NONE)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        if vars(owner).get(name, _NONE) is value:
            delattr(owner, name)
            if own is not _NONE:
                setattr(owner, name, own)


@contextmanager
def switched(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Put a value into a global setting within a context; afterwards the setting has what ``get`` returned before."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)
