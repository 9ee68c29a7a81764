"""Which micro-batches a plan traces, in which ways, and where it gives up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_solo.errors import PlanError
from lightning_solo.planner import traces
from lightning_solo.planner.rules import arrange
from lightning_solo.presets.compose import compose
from lightning_solo.units import GiB


@pytest.mark.parametrize(
    ("size", "at_once"),
    [(1, [1, 2, 3, 4]), (2, [2, 3, 4]), (3, [3, 2, 4]), (8, [8, 2, 3])],
)
@pytest.mark.parametrize("follows", [True, False])
def test_micro_batches_are_traced_in_parallel(
    size: int, at_once: list[int], follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single example seldom follows from larger batches, so a third of these tells whether they scale."""
    asked: list[list[int]] = []
    predicted: list[int] = []

    def run_at_once(*captures: Any, **_: Any) -> list[Any]:
        results = [capture() for capture in captures]
        asked.append([result.size for result in results])
        return results

    def predicts(size: int, trace: Any) -> bool:
        assert trace.size == size
        predicted.append(size)
        return follows and size > 1

    monkeypatch.setattr(traces, "run_in_forks", run_at_once)
    monkeypatch.setattr(traces, "affine_trace", lambda *pair: SimpleNamespace(predicts=predicts))
    scalable: Any = traces.scalable_trace(
        lambda size, **_: SimpleNamespace(size=size, assumptions=[]), lambda: nn.Linear(3, 2), size, 4
    )
    assert asked == [at_once]
    assert predicted == ([1, 4] if size == 1 else [size])
    assert (scalable.affine is not None) == follows
    assert scalable.trace.size == size


@pytest.mark.parametrize(("available", "ways"), [(255, [True, True]), (256, [True, True, False])])
def test_real_steps_are_not_tried_without_host_memory(
    available: int, ways: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight parameters: weight, gradient and two states of fp32, twice: 8 x 16 x 2 = 256 bytes."""
    tried = []

    def capture(size: int, fake: bool, attention: str) -> Any:
        tried.append(fake)
        raise ValueError("no way")

    monkeypatch.setattr(traces, "host_memory", lambda: (GiB, available))
    monkeypatch.setattr(traces, "run_in_forks", lambda *captures, **_: [capture() for capture in captures])
    with pytest.raises(PlanError, match="no way"):
        traces.scalable_trace(capture, lambda: nn.Linear(3, 2), 2, 4)
    assert tried == ways


def test_sixteen_bit_floats_are_arranged_as_bf16() -> None:
    arranged = arrange(compose("fp16"), {})
    assert arranged.arguments()["precision"] == "bf16-mixed"
    assert arranged.precision == "16-mixed"
    assert any("16-mixed" in text for text in arranged.assumptions)
    assert not arrange(compose("bf16"), {}).assumptions
