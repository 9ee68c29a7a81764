"""Functions at the same time: their results or their errors in order, and no process that is left."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lightning_solo.errors import PlanError
from lightning_solo.planner.forks import run_in_forks


def children() -> set[str]:
    """Return the processes that this one has started and not waited for."""
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


def raises(error: BaseException) -> Any:
    raise error


def waits() -> Any:
    while True:
        signal.pause()


def test_results_are_in_order_and_each_from_another_process() -> None:
    here, *there = run_in_forks(os.getpid, os.getpid, os.getpid)
    assert here == os.getpid()
    assert len({here, *there}) == 3


def test_single_function_needs_no_process() -> None:
    assert run_in_forks(os.getpid) == [os.getpid()]


def test_functions_that_are_not_needed_are_ended() -> None:
    assert run_in_forks(lambda: 1, waits, waits, needed=lambda result: result > 1) == [1]
    assert run_in_forks(lambda: 2, lambda: 3, needed=lambda result: result > 1) == [2, 3]


@pytest.mark.parametrize("error", [ZeroDivisionError("first"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_exception_of_the_first_ends_the_others(error: BaseException) -> None:
    with pytest.raises(type(error)):
        run_in_forks(partial(raises, error), waits, waits)


def test_exception_of_another_is_raised_and_ends_the_rest() -> None:
    with pytest.raises(ZeroDivisionError, match="second"):
        run_in_forks(lambda: 1, partial(raises, ZeroDivisionError("second")), waits)


@pytest.mark.parametrize(
    ("dies", "how"),
    [(lambda: os.kill(os.getpid(), 9), "SIGKILL"), (partial(os._exit, 3), "exit status 3")],
    ids=["kill", "exit"],
)
def test_death_of_a_fork_is_an_error(dies: Callable[[], Any], how: str) -> None:
    with pytest.raises(PlanError, match=how):
        run_in_forks(lambda: 1, dies)


def test_functions_run_at_the_same_time(tmp_path: Path) -> None:
    def meets(name: str, other: str) -> str:
        (tmp_path / name).touch()
        end = time.monotonic() + 500
        while not (tmp_path / other).exists():
            assert time.monotonic() < end
        return name

    assert run_in_forks(partial(meets, "a", "b"), partial(meets, "b", "c"), partial(meets, "c", "a")) == ["a", "b", "c"]


class Garbage:
    """A cycle that only the collector frees, and that notes the process in which it was."""

    freed_in: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.freed_in.append(os.getpid())


def test_garbage_of_the_parent_is_not_freed_in_a_fork() -> None:
    def collects() -> list[int]:
        Garbage()  # the fork's own
        gc.collect()
        return [pid - os.getpid() for pid in Garbage.freed_in]

    gc.disable()
    try:
        Garbage()
        assert run_in_forks(lambda: None, collects) == [None, [0]]
    finally:
        gc.enable()
