"""ZeroStageStrategy on one device. Runs on several devices are tested in tests/engines."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch

from lightning_solo.errors import ConflictError
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.zero3.technique import ZeroStageStrategy
from tests.messages import mentions
from tests.modules import Stack, regression
from tests.techniques.test_ddp import fitted
from tests.training import equal

pytest.importorskip("deepspeed")


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_one_device_trains_as_without_it(stage: int, tmp_path: Path) -> None:
    plain, _ = fitted("baseline", tmp_path)
    module, trainer = fitted(["zero3", "baseline"], tmp_path, overrides=[f"strategy.stage={stage}"], devices=1)
    assert trainer.strategy.world_size == 1
    assert isinstance(trainer.strategy, ZeroStageStrategy)
    assert not torch.distributed.is_initialized()
    assert equal(dict(plain.state_dict()), dict(module.state_dict()), 1e-6)


def test_double_precision_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("strategy=zero3", "precision=32-true")):
        compose("zero3", ["precision=64-true"])


@pytest.mark.long
def test_an_error_of_two_types_says_that_there_is_no_autocast(tmp_path: Path) -> None:
    module = regression(L, Stack(blocks=1))
    module.net.head.register_forward_pre_hook(lambda part, args: args[0].float())
    with pytest.raises(RuntimeError, match=mentions("strategy=zero3", "bfloat16", "x.to(self.dtype)")):
        fitted(["zero3", "bf16"], tmp_path, module, devices=1)
