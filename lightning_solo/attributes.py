"""Replacement of an attribute of an object, class or module, for as long as a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NONE: Any = object()  # an attribute that the object itself doesn't have


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute of an object, and yield the one before.

    Raises:
        AttributeError: there is none of that name: its library has moved it.
    """
    original, own = getattr(owner, name), vars(owner).get(name, _NONE)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        if vars(owner).get(name, _NONE) is value:  # else somebody has replaced it since
            delattr(owner, name)
            if own is not _NONE:
                setattr(owner, name, own)
