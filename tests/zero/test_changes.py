"""Weights that callbacks and modules change while ZeRO's engine trains: kept as under a plain Trainer, or told."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from tests.messages import mentions
from tests.modules import Stack, loader, regression

deepspeed = pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
]


def strategy(home: ModuleType, **arguments: Any) -> Any:
    return for_home(ZeroOffloadStrategy, home.__name__)(allow_cpu=True, host_optimizer="torch", **arguments)


def module(home: ModuleType) -> Any:
    torch.manual_seed(0)
    return regression(home, Stack(blocks=2))


def clamping(home: ModuleType, *, gathers: bool = False) -> Any:
    """Return a callback that loads the head's weight when training starts, and clamps it after each batch."""

    def around(weight: nn.Parameter) -> Any:
        return deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if gathers else nullcontext()

    class Clamp(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad(), around(pl_module.net.head.weight):
                pl_module.net.head.weight.copy_(torch.full_like(pl_module.net.head.weight, 0.015625))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with torch.no_grad(), around(pl_module.net.head.weight):
                pl_module.net.head.weight.clamp_(-0.03125, 0.03125)  # exact in bf16

    return Clamp()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_weight_changed_in_place_stays_changed(
    home: ModuleType, make_trainer: Any, stage: int, accumulation: int
) -> None:
    plain, offloaded, unchanged = module(home), module(home), module(home)
    arguments = {"accumulate_grad_batches": accumulation}
    make_trainer(home, **arguments).fit(unchanged, loader())
    make_trainer(home, callbacks=[clamping(home)], **arguments).fit(plain, loader())
    callbacks = [clamping(home, gathers=stage == 3)]
    make_trainer(home, strategy=strategy(home, stage=stage), callbacks=callbacks, **arguments).fit(offloaded, loader())
    for p, q in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(p, q)
    assert offloaded.net.head.weight.abs().max().item() == 0.03125
    assert unchanged.net.head.weight.abs().max().item() > 0.1


def test_a_change_that_stage_3_cannot_see_is_told(home: ModuleType, make_trainer: Any) -> None:
    trainer = make_trainer(home, strategy=strategy(home, stage=3), callbacks=[clamping(home)])
    with pytest.warns(UserWarning, match=mentions("net.head.weight", "GatheredParameters")):
        trainer.fit(module(home), loader())


def test_a_frozen_weight_changed_in_place_is_kept_in_file_and_module(
    home: ModuleType, make_trainer: Any, tmp_path: Any
) -> None:
    """A teacher's moving average, under bf16: what the engine casts, and would go back to what it was."""
    made = module(home)
    made.teacher = nn.Parameter(torch.full((3,), 1.1), requires_grad=False)

    class Average(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with torch.no_grad():
                pl_module.teacher.fill_(2.5)

    keep = home.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", filename="kept")
    trainer = make_trainer(
        home,
        strategy=strategy(home),
        precision="bf16-mixed",
        enable_checkpointing=True,
        callbacks=[Average(), keep],
    )
    trainer.fit(made, loader())
    saved = torch.load(keep.best_model_path, weights_only=True)["state_dict"]["teacher"]
    assert torch.equal(saved, torch.full((3,), 2.5))
    assert torch.equal(made.teacher, torch.full((3,), 2.5))
    assert saved.dtype == made.teacher.dtype == torch.float32
