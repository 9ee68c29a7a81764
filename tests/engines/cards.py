"""Fits of two processes under an engine and each technique, driven from the cards."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.configuration import Chosen, Configuration
from lightning_solo.cards.engines import EXACT, ROUNDING, answer_of
from tests.contract.runs import BATCHES, WIDTH, fields, module_of, trainer_of
from tests.modules import loader

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "accumulation_schedule": {"milestones": [[0, 2]]},
    "adapters": {"after_fit": "keep"},
    "compact_states": {"master_bits": 32},
    "curriculum": {"duration": 4},
    "leak_finder": {"every_n_steps": 1, "consecutive": 2},
    "micro_batching": {"micro_batch": 2},
}
"""Settings under which a technique acts in a few steps, or is not refused, where the card's for a CPU don't."""


ELSEWHERE = {
    "packing"
}  # tests/engines/test_items.py compares the documents; the loss is a mean over a process's tokens


def settings_of(card: Card) -> dict[str, Any]:
    """Return the settings of a technique in these runs."""
    return {**(card.on_cpu or {}), **SETTINGS.get(card.name, {})}


def answers(engine: str) -> dict[str, str]:
    """Return what the cards answer for an engine: name -> `EXACT` or `ROUNDING`, of all that run on a CPU."""
    found = {}
    for card in built_in_cards().values():
        if card.group == "callback" and card.on_cpu is not None and card.name not in ELSEWHERE:
            chosen = Chosen(card, card.check(settings_of(card)), f"callback.{card.name}")
            found[card.name] = answer_of(chosen, engine, Configuration(techniques=(chosen,)))
    return {name: answer for name, answer in found.items() if answer in (EXACT, ROUNDING)}


class Updates(L.Callback):
    """Keeps the losses, averaged over processes, and how all weights changed, before a technique merges any."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.before = dict[str, Tensor]()
        self.values = dict[str, Tensor]()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = weights(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trained = {name for name, p in pl_module.named_parameters() if p.requires_grad}
        after = weights(trainer)
        self.values = {name: after[name] - self.before[name] for name in sorted(trained & after.keys())}


def weights(trainer: Any) -> dict[str, Tensor]:
    """Return the whole weights in fp32 in the first process; all processes must call it."""
    state = trainer.strategy.lightning_module_state_dict()
    return {name: value.detach().float().clone() for name, value in copy.copy(state).items()}


def trained(folder: Path, *cards: Card, devices: int, dropout: bool) -> dict[str, Any]:
    """Train under techniques, with the whole batch on one device or half of it on each of two."""
    module = module_of(L)
    for part in module.modules():
        if isinstance(part, nn.Dropout) and not dropout:
            part.p = 0.0
    preset = fields(*cards, precision="32-true")
    preset["callback"] = {name: settings_of(built_in_cards()[name]) for name in preset["callback"]}
    updates = Updates()
    batches = loader(BATCHES * devices, batch_size=8 // devices, width=WIDTH)
    trainer = trainer_of(L, folder, preset, devices=devices, callbacks=[updates])
    torch.manual_seed(4)
    trainer.fit(module, batches)
    return {"losses": updates.losses, "updates": updates.values, "steps": trainer.global_step}


def under_engine(folder: Path, engine: str, *names: str) -> dict[str, Any]:
    """Train under an engine alone, and together with each technique."""
    strategy, results = built_in_cards()[engine], dict[str, Any]()
    results["alone"] = trained(folder, strategy, devices=2, dropout=True)
    for name, answer in answers(engine).items():
        if names and name not in names:
            continue
        card = built_in_cards()[name]
        try:
            results[name] = trained(folder, card, strategy, devices=2, dropout=answer == EXACT)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    return results
