"""The guard lets through what the preset promised, and stops a run in which something of it was lost."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from lightning_solo.errors import CapabilityError, ConflictError
from lightning_solo.guard import PresetGuard
from tests.modules import loader, regression


def fit(home: ModuleType, trainer: Any) -> None:
    trainer.fit(regression(home), loader(2))


def test_lets_through_what_was_promised(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    promised = {"devices": 1, "precision": "bf16-mixed", "accumulate_grad_batches": 2, "callbacks": []}
    arguments = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    trainer = make_trainer(home, callbacks=[PresetGuard(promised)], **arguments)
    fit(home, trainer)
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("promised", "words"),
    [
        ({"precision": "bf16-mixed"}, "precision='bf16-mixed', but the Trainer was given '32-true'"),
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4, but the Trainer was given 1"),
        ({"strategy": object()}, "sets strategy="),
        ({"devices": 2}, "one device"),
    ],
)
def test_stops_a_run_in_which_something_was_lost(
    home: ModuleType, make_trainer: Callable[..., Any], promised: dict[str, Any], words: str
) -> None:
    trainer = make_trainer(home, callbacks=[PresetGuard(promised)])
    with pytest.raises(ConflictError, match=words):
        fit(home, trainer)


def test_row_21_gpu_precision_on_another_device(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(home, callbacks=[PresetGuard({"accelerator": "cuda"})])
    with pytest.raises(CapabilityError, match="needs a CUDA device, but the Trainer runs on cpu"):
        fit(home, trainer)
