"""Functions at the same time: their results or their errors in order, and no process that is left."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tqdm import tqdm

from lightning_solo.errors import PlanError
from lightning_solo.planner import forks
from lightning_solo.planner.forks import run_in_forks, run_in_workers


def children() -> set[str]:
    """Return the processes that this one has started and not waited for."""
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(forks, "has_threads", lambda: False)  # which other tests may have left
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


def test_process_with_other_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = forks.has_threads()
    with tqdm(range(2), disable=False, file=io.StringIO()):
        assert forks.has_threads() == before
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert run_in_forks(os.getpid, os.getpid) == 2 * [os.getpid()]
        assert list(run_in_workers(lambda item: os.getpid(), "ab", str, 2)) == [("a", os.getpid()), ("b", os.getpid())]
    finally:
        end.set()
        thread.join()


# --- items in a few processes ---


def test_results_of_workers_are_in_the_order_of_items(tmp_path: Path) -> None:
    ends = tmp_path / "the second ends"
    os.mkfifo(ends)

    def called(item: int) -> tuple[int, int]:
        if item == 1:
            ends.read_text()  # until the second is called, in another process
        if item == 2:
            ends.write_text("")
        return item, os.getpid()

    results = list(run_in_workers(called, range(1, 6), lambda item: item, 2))
    assert [(item, result[0]) for item, result in results] == [(item, item) for item in range(1, 6)]
    processes = {result[1] for _, result in results}
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_items_of_one_key_share_a_process() -> None:
    results = list(run_in_workers(lambda item: os.getpid(), "abAcBC", str.lower, 3))
    pids = [pid for _, pid in results]
    assert pids[0] == pids[2]


def test_item_whose_process_dies_has_an_error_and_the_others_a_result() -> None:
    def called(item: int) -> int:
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return 10 * item

    results = dict(run_in_workers(called, range(5), lambda item: item % 2, 2))
    assert "SIGKILL" in str(results.pop(2))
    assert results == {0: 0, 1: 10, 3: 30, 4: 40}


def test_workers_end_when_the_caller_stops() -> None:
    results = run_in_workers(lambda item: waits() if item else item, range(3), lambda item: item, 3)
    assert next(results) == (0, 0)
    results.close()


def test_no_items_need_no_process() -> None:
    assert list(run_in_workers(waits, [], id, 2)) == []
