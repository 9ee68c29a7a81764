"""Run work that may run out of memory, and free all of its tensors if it does."""

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

    An exception keeps the frames that it passed, and their tensors, alive. So the frames of the error and of its causes
    are cleared, cycles are collected, and the device's cached memory is released. Other errors are raised unchanged.
    """
    outer = sys.exc_info()[1]  # the error that the caller is handling; its frames are kept
    try:
        return function(), None
    except Exception as error:
        if not is_out_of_memory(error, outer):
            raise
        failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
        clear_frames(error, outer)
    gc.collect()
    with suppress(RuntimeError):  # it may itself find no memory
        torch.cuda.empty_cache()
    return None, failure


def clear_frames(error: BaseException, outer: BaseException | None) -> None:
    """Clear the variables in the frames of an error and of its causes, but not in those of ``outer``."""
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
