"""Replace an attribute of an object, class or module within a context."""

from __future__ import annotations

from collections.abc import Iterator
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
