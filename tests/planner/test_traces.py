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


@pytest.mark.parametrize("follows", [True, False], ids=["linear", "not linear"])
@pytest.mark.parametrize(
    ("size", "known", "traced"),
    [
        (1, None, [1, 2, 3, 4]),
        (1, (2, 3), [1, 2, 3]),
        (2, None, [2, 3, 4]),
        (3, None, [3, 2, 4]),
        (8, None, [8, 2, 3]),
        (8, (2, 8), [8, 2]),
    ],
)
def test_micro_batches_that_are_traced(
    size: int, known: tuple[int, int] | None, traced: list[int], follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single example seldom follows from larger batches, so a third of these tells whether they scale."""
    asked: list[int] = []
    predicted: list[int] = []

    def capture(size: int, **_: Any) -> Any:
        asked.append(size)
        return SimpleNamespace(size=size, assumptions=[])

    def predicts(size: int, trace: Any) -> bool:
        assert trace.size == size
        predicted.append(size)
        return follows and size > 1

    affine = SimpleNamespace(predicts=predicts, contains=lambda *call: False)
    monkeypatch.setattr(traces, "affine_trace", lambda *pair: affine)
    scalable: Any = traces.scalable_trace(capture, lambda: nn.Linear(3, 2), size, 4, known)
    assert asked == traced
    assert predicted == ([] if known else [1, 4] if size == 1 else [size])
    assert (scalable.affine is not None) == (follows or known is not None)
    assert scalable.trace.size == size


def test_example_that_only_lacks_copies_needs_no_further_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    affine = SimpleNamespace(predicts=lambda *call: False, contains=lambda *call: True)
    monkeypatch.setattr(traces, "affine_trace", lambda *pair: affine)
    scalable: Any = traces.scalable_trace(lambda size, **_: asked.append(size), lambda: nn.Linear(3, 2), 1, 4)
    assert (asked, scalable.affine) == ([1, 2, 3], affine)


def test_no_other_micro_batch_is_traced_if_one_example_does_not_fit() -> None:
    scalable: Any = traces.scalable_trace(
        lambda size, **_: [size], lambda: nn.Linear(3, 2), 1, 4, fits=lambda trace: False
    )
    assert (scalable.trace, scalable.affine, scalable.alone) == ([1], None, True)


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
    with pytest.raises(PlanError, match="no way"):
        traces.scalable_trace(capture, lambda: nn.Linear(3, 2), 2, 4)
    assert tried == ways


def test_an_error_of_an_import_names_no_model_states() -> None:
    def capture(size: int, **kind: Any) -> Any:
        raise ModuleNotFoundError("No module named 'peft'", name="peft")

    with pytest.raises(PlanError, match=r"^ModuleNotFoundError: No module named 'peft'[^;]*$"):
        traces.scalable_trace(capture, lambda: nn.Linear(3, 2), 2, 4)


def test_sixteen_bit_floats_are_arranged_as_bf16() -> None:
    arranged = arrange(compose("fp16"), {})
    assert arranged.arguments()["precision"] == "bf16-mixed"
    assert arranged.precision == "16-mixed"
    assert any("16-mixed" in text for text in arranged.assumptions)
    assert not arrange(compose("bf16"), {}).assumptions
