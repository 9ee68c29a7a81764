"""Fits of a small model under techniques by their cards alone, for tests over all of them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import lightning_solo as solo
from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import built_in_cards
from tests.modules import CLASSES, OF_DOCUMENTS, Classifier, Documents, classification, documents, loader

WIDTH = 64  # linear layers of 64 x 256: moments in 8 bits start at 4,096 elements
BATCHES = 6
PRECISION = "bf16-mixed"
ON_CPU = [card for card in built_in_cards().values() if card.on_cpu is not None]


def fields(*cards: Card, precision: str = PRECISION) -> dict[str, Any]:
    """Return the fields of a preset that consists of techniques, with settings under which they run on a CPU."""
    preset: dict[str, Any] = {"precision": precision, "callback": {}}
    for card in cards:
        settings = dict(card.on_cpu or {})
        if card.group == "strategy":
            preset["strategy"] = {"name": card.name, **settings}
        else:
            preset["callback"][card.name] = settings
    return preset


class Attending(Classifier):
    """A classifier with an embedding, attention between the parts of a row, and an activation before its head."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.activation = torch.nn.LeakyReLU()
        self.sizes = torch.nn.Embedding(CLASSES, arguments["width"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x + self.sizes(x[:, 0].abs().mul(4).long().clamp(max=CLASSES - 1)))
        parts = x.view(len(x), 1, 8, -1)
        return self.head(self.activation(x + scaled_dot_product_attention(parts, parts, parts).view(x.shape)))


def module_of(home: ModuleType) -> Any:
    """Return the module that is trained, the same each time: a classifier, with blocks and a head for its classes.

    One of its weights is frozen.
    """
    torch.manual_seed(3)
    net = Attending(blocks=2, width=WIDTH, dropout=0.1)
    net.blocks[1].up.weight.requires_grad_(False)
    return classification(home, net, lr=1e-3)


def batches_of(*cards: Card) -> Any:
    """Return a loader that techniques take: of as many batches of rows, or of 24 documents."""
    if OF_DOCUMENTS.isdisjoint(card.name for card in cards):
        return loader(BATCHES, width=WIDTH)
    return documents()


def weighed(preset: dict[str, Any], batches: Any) -> dict[str, Any]:
    """Return a preset's fields whose parts of documents, with a mean over tokens as loss, count by tokens."""
    if isinstance(batches.dataset, Documents) and "micro_batching" in preset["callback"]:
        preset["callback"]["micro_batching"]["weight_by"] = "shifted_tokens"
    return preset


def trainer_of(home: ModuleType, folder: Path, preset: Mapping[str, Any], **arguments: Any) -> Any:
    """Return a quiet Trainer under a preset."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(folder),
        "max_epochs": 1,
    }
    callbacks = arguments.pop("callbacks", ())
    kwargs = solo.trainer_kwargs(preset, lightning=home.__name__, callbacks=callbacks)
    return home.Trainer(**{**quiet, **kwargs, **arguments})


@dataclass
class Fit:
    """A finished fit: module, Trainer, and the weights in fp32 before and after."""

    module: Any
    trainer: Any
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    @property
    def updates(self) -> Tensor:
        """All changes of all trained weights, in one vector."""
        trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return torch.cat([(self.after[name] - self.before[name]).flatten() for name in trained])


def weights_of(module: Any) -> dict[str, Tensor]:
    """Return copies of the weights, in fp32."""
    return {name: p.detach().float().cpu().clone() for name, p in module.named_parameters()}


def fit(
    folder: Path,
    *cards: Card,
    home: str = "lightning.pytorch",
    precision: str = PRECISION,
    batches: Any = None,
    **arguments: Any,
) -> Fit:
    """Train under techniques, on batches that they take, and return what came of it."""
    package = importlib.import_module(home)
    module = module_of(package)
    before = copy.deepcopy(weights_of(module))
    if batches is None:
        batches = batches_of(*cards)
    preset = weighed(fields(*cards, precision=precision), batches)
    trainer = trainer_of(package, folder, preset, **arguments)
    torch.manual_seed(4)
    trainer.fit(module, batches)
    return Fit(module, trainer, before, weights_of(module))
