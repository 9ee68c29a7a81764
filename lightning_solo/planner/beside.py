"""Two functions at the same time, the second in a fork: tracing is Python, which runs on one core."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_solo.errors import PlanError
from lightning_solo.planner.parent import ended_with_its_parent

First = TypeVar("First")
Second = TypeVar("Second")


def beside(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Return the results of both.

    Raises:
        Exception: that of either, the first one's first.
        PlanError: the second's process died, or raised what can't be sent.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            ended_with_its_parent()
            torch.set_num_threads(1)  # OpenMP's threads are not there after a fork, and would be waited for
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(_answer(second))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            here = first()
            answer = pipe.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    if not answer:
        raise PlanError(f"a process that traces ended with status {os.waitstatus_to_exitcode(status)}")
    worked, there = pickle.loads(answer)
    if not worked:
        raise there
    return here, there


def _answer(function: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((True, function()))
    except Exception as error:
        try:
            return pickle.dumps((False, error))
        except Exception:
            return pickle.dumps((False, PlanError(f"{type(error).__name__}: {error}")))
