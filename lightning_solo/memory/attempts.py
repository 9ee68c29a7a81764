"""Work that may run out of memory, and of which nothing is left behind when it does."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from lightning_solo.out_of_memory import is_out_of_memory

T = TypeVar("T")


def attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return a function's result and None; or None and the first line of an out-of-memory error.

    An exception holds the frames it has passed, and these hold tensors, so that memory is short until it is gone. Here
    it is gone when this function returns: frames are cleared, of the errors too from which it was raised, cycles are
    collected and the device's cached memory is released. Other errors are raised as they are.
    """
    failure, outer = None, sys.exc_info()[1]
    try:
        return function(), None
    except Exception as error:
        if not is_out_of_memory(error, outer):
            raise
        failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
        clear_frames(error, outer)
    release_memory()
    return None, failure


def clear_frames(error: BaseException, outer: BaseException | None = None) -> None:
    """Take the tensors from an error and from those that it was raised from: their frames' variables.

    Not from ``outer``, which was being handled before, and whose frames are others'.
    """
    seen = {id(outer)}
    ahead: list[BaseException | None] = [error]
    while ahead:
        link = ahead.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        ahead += [link.__cause__, link.__context__]
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__cause__ = link.__context__ = None


def release_memory() -> None:
    """Collect cycles, and give back what the device's allocator has cached."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # it may itself find no memory
            torch.cuda.empty_cache()
