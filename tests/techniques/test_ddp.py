"""DataParallelStrategy: on one device to the bit as a plain run; several are in tests/engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

import lightning_solo as solo
from lightning_solo.errors import ConflictError
from lightning_solo.seams.engines import engine_of
from lightning_solo.techniques.ddp.technique import DataParallelStrategy
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
    "gradient_clip_val": 0.1,
    "accumulate_grad_batches": 2,
}


def fitted(preset: Any, folder: Path, module: Any = None, overrides: Sequence[str] = (), **arguments: Any) -> Any:
    """Return a module and the Trainer that trained it under a preset."""
    torch.manual_seed(1)
    module = module or regression(L, Stack(blocks=2))
    ours = solo.trainer_kwargs(preset, overrides)
    trainer = L.Trainer(**{**QUIET, "default_root_dir": str(folder), **ours, **arguments})
    trainer.fit(module, loader(4))
    return module, trainer


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_one_device_trains_as_without_it(engine: str, tmp_path: Path) -> None:
    plain, _ = fitted("baseline", tmp_path)
    module, trainer = fitted([engine, "baseline"], tmp_path, devices=1)
    assert trainer.strategy.world_size == 1
    assert engine_of(trainer.strategy) == engine
    assert engine_of(DataParallelStrategy()) == "ddp"
    assert engine_of(L.strategies.SingleDeviceStrategy()) == ""
    assert not torch.distributed.is_initialized()  # the group of one process ends with the run
    assert equal(plain, module)


def test_devices_of_preset_and_trainer_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=mentions("trainer.devices=3", "devices=2")):
        solo.trainer({"devices": 3, **QUIET}, "ddp", ["devices=2"])
    assert solo.trainer({"devices": 2, **QUIET}, "ddp").num_devices == 2
    assert solo.trainer({"devices": "2", **QUIET}, "ddp", ["devices=2"]).num_devices == 2
    with pytest.raises(ConflictError, match=mentions("trainer.devices=2", "['ddp', 'bf16']")):
        solo.trainer({"devices": 2, **QUIET}, "bf16")
