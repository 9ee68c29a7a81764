"""Every strategy of ours is copied, pickled and found by its class's name, before, during and after a fit."""

from __future__ import annotations

import copy
import io
import pickle
from types import ModuleType
from typing import Any

import cloudpickle
import lightning.pytorch
import pytest
import pytorch_lightning
import torch

from lightning_solo.cards.catalogue import built_in_cards, load_class
from lightning_solo.seams.homes import for_home
from tests.modules import Stack, loader

pytestmark = pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
STRATEGIES = {card.name: card for card in built_in_cards().values() if card.group == "strategy"}


class Step:
    """A module's own methods, for the modules of both homes; at the top of this file, where pickle finds them."""

    net: torch.nn.Module

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]).float() - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class OfLightning(Step, lightning.pytorch.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()


class OfPytorchLightning(Step, pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()


def strategy_of(name: str, home: str) -> Any:
    pytest.importorskip("deepspeed" if name == "zero_offload" else "torch", reason="listed on Linux only")
    return for_home(load_class(STRATEGIES[name]), home)(**(STRATEGIES[name].on_cpu or {}))


def saved_and_loaded(module: torch.nn.Module) -> None:
    """Save a module, which is attached to its Trainer, whole."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for p, q in zip(torch.load(file, weights_only=False).parameters(), module.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_pickled_before_during_and_after_a_fit(home: ModuleType, make_trainer: Any, name: str) -> None:
    module = OfLightning() if home is lightning.pytorch else OfPytorchLightning()
    strategy, seen = strategy_of(name, home.__name__), []

    def pickled() -> None:
        for library in (pickle, cloudpickle):
            assert library.loads(library.dumps(type(strategy))) is type(strategy)
            assert type(library.loads(library.dumps(strategy))) is type(strategy)
        assert type(copy.deepcopy(strategy)) is type(strategy)
        if name not in ("zero_offload", "zero3", "fsdp") or not trainer.training:  # whose engines change the module
            saved_and_loaded(module)
        seen.append(trainer.state.stage)

    class Look(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                pickled()

    precision = "32-true"
    trainer = make_trainer(home, strategy=strategy, callbacks=[Look()], precision=precision)
    pickled()
    trainer.fit(module, loader())
    pickled()
    assert [str(stage) for stage in seen] == ["None", "RunningStage.TRAINING", "None"]
    trained = make_trainer(
        home, strategy=pickle.loads(pickle.dumps(strategy_of(name, home.__name__))), precision=precision
    )
    trained.fit(module, loader())
    assert trained.global_step == 10
