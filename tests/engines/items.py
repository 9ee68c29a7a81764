"""Fits on two processes that note the items of each batch, under techniques that make the batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.engines.processes import ENGINES, trained
from tests.modules import Texts, padded

ITEMS, STEPS, SAVED = 31, 13, 3
TECHNIQUES: Mapping[str, dict[str, Any]] = {
    "length_bucketing": {},
    "by_tokens": {"max_tokens": 30},
    "packing": {"capacity": 12, "rows": 2},
    "curriculum": {"duration": 8},
    "by_loss": {"by": "loss", "duration": 100, "pace": "tokens"},
}
NAMES = {"by_tokens": "length_bucketing", "by_loss": "curriculum"}


class Reader(L.LightningModule):
    """Notes the items of each batch; its loss of a token depends on no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(4))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = batch["labels"] != -100
        return (batch["input_ids"] * kept).sum() / kept.sum() * self.weights.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([int(item) for item in batch["input_ids"].unique() if item])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Notes(L.Callback):
    """Collects what each process has seen, and saves a checkpoint within an epoch."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.seen = path, list[Any]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path is not None and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = [pl_module.seen]
        if trainer.world_size > 1:
            self.seen = [None] * trainer.world_size
            torch.distributed.all_gather_object(self.seen, pl_module.seen)


def seen(folder: Path, engine: str, kind: str, devices: int, **arguments: Any) -> list[Any]:
    """Return the items of each batch, for each process; a process's batch has 6 items in all."""
    preset: dict[str, Any] = {"callback": {NAMES.get(kind, kind): dict(TECHNIQUES[kind])}}
    if engine:
        preset["strategy"] = ENGINES[engine]
    batches: Any = DataLoader(Texts(ITEMS), 6 // devices, shuffle=True, collate_fn=padded)
    saves = "ckpt_path" not in arguments
    notes = Notes(folder / f"{kind}-{engine}.ckpt" if saves else None)
    trained(
        preset, folder, devices=devices, module=Reader(), batches=batches, callbacks=[notes],
        **{"max_epochs": 3, "max_steps": STEPS, **arguments},
    )  # fmt: skip
    return notes.seen


def split(folder: Path, *engines: str) -> dict[str, Any]:
    """Return what two processes see under each technique, in a whole run and in one that resumes within an epoch."""
    results = {}
    for engine in engines:
        for kind in TECHNIQUES:
            results[f"{kind}-{engine}"] = seen(folder, engine, kind, 2)
            path = folder / f"{kind}-{engine}.ckpt"
            results[f"{kind}-{engine} resumed"] = seen(folder, engine, kind, 2, ckpt_path=path)
    return results
