"""Of work that ran out of memory nothing is alive, whoever has kept its error."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_solo.memory.attempts import attempt

KEPT: list[Any] = []


def work() -> None:
    """Run out of memory with a tensor in each of three frames: of the call, of the cause, of what was handled."""

    def inner() -> None:
        tensor = made()
        raise torch.OutOfMemoryError(f"out of memory beside {tensor.numel()}")

    tensor = made()
    try:
        inner()
    except torch.OutOfMemoryError as error:
        kept = made()
        try:
            raise KeyError("a context")
        except KeyError:
            raise RuntimeError(f"wrapped {tensor.numel() + kept.numel()}") from error


ALIVE: list[weakref.ref[Tensor]] = []


def made() -> Tensor:
    tensor = torch.zeros(4)
    ALIVE.append(weakref.ref(tensor))
    return tensor


def a_list_keeps(error: BaseException) -> None:
    KEPT.append(error)


def the_interpreter_keeps(error: BaseException) -> None:
    sys.last_exc = sys.last_value = error  # type: ignore[attr-defined]
    sys.last_traceback = error.__traceback__


def another_error_keeps(error: BaseException) -> None:
    other = ValueError("another")
    other.__context__ = error
    KEPT.append(other)


@pytest.mark.parametrize(
    "keep",
    [a_list_keeps, the_interpreter_keeps, another_error_keeps],
)
@pytest.mark.row(65)
def test_failed_work_keeps_no_tensor_alive(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_exc", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    KEPT.clear()
    ALIVE.clear()

    def kept() -> None:
        try:
            work()
        except RuntimeError as error:
            keep(error)
            raise

    result, failure = attempt(kept)
    assert result is None
    assert failure is not None
    assert "wrapped 8" in failure
    assert len(ALIVE) == 3
    assert [ref() for ref in ALIVE] == [None] * 3
    KEPT.clear()


def test_error_handled_by_the_caller_keeps_its_traceback() -> None:
    try:
        raise torch.OutOfMemoryError("of another time")
    except torch.OutOfMemoryError as outer:
        _, failure = attempt(work)
        assert failure is not None
        where = outer.__traceback__
        assert where is not None
        with pytest.raises(RuntimeError, match="shapes differ"):
            attempt(fails)


def fails() -> None:
    raise RuntimeError("shapes differ")


def test_result_is_returned() -> None:
    assert attempt(lambda: 3) == (3, None)


@pytest.mark.row(69)
def test_cache_that_can_not_be_emptied_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    result, failure = attempt(work)
    assert result is None
    assert failure is not None
    assert "wrapped 8" in failure
