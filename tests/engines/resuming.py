"""Fits on two processes that are killed and resumed, whose processes draw different random numbers."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.engines.processes import ENGINES, rank, trained, whole_weights

BATCHES, EPOCHS, LAST = 5, 2, 4
SAVED = {"ddp": (1, 2, 5, 8), "fsdp": (1, 2, 5, 8), "zero2": (2, 7), "zero3": (2, 7)}
"""Engine -> batches after which a resumed run is compared; DeepSpeed's gradients of an open window aren't saved."""


class Noisy(Dataset[Any]):
    """Rows of four numbers with noise, that each process draws."""

    def __len__(self) -> int:
        return 2 * 3 * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.randn(4) + random.random()])


class Net(L.LightningModule):
    """A perceptron with dropout and statistics of batches, which notes the items and losses of its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.norm(self.blocks(batch[:, 1:])).square().sum(1).sqrt().mean()
        self.log("loss", loss, on_epoch=True, on_step=False)
        self.seen.append([*batch[:, 0].tolist(), float(loss)])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Saves(L.Callback):
    """Saves after each batch, kills the processes after one of them, and collects what they are at the end."""

    def __init__(self, folder: Path | None, kills: bool) -> None:
        self.folder, self.kills = folder, kills
        self.each: list[Any] = [None, None]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{done}.ckpt")
        if self.kills and done == LAST:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        end = {
            "seen": pl_module.seen,
            "weights": whole_weights(trainer),
            "buffers": dict(pl_module.named_buffers()),
            "loss": trainer.callback_metrics["loss"],
            "random": [torch.rand(2), random.random()],
        }
        torch.distributed.all_gather_object(self.each, end)


def fitted(folder: Path | None, engine: str, kills: bool = False, path: Path | None = None) -> list[Any]:
    """Return each process's end of a fit."""
    end, module = Saves(folder, kills), Net()
    torch.manual_seed(rank() if path is None else 99)
    random.seed(rank() if path is None else 99)
    preset = {"strategy": ENGINES[engine], "callback": {"exact_resume": {}}}
    trained(
        preset, folder or Path(), module=module, batches=DataLoader(Noisy(), batch_size=3, shuffle=True),
        callbacks=[end], ckpt_path=path, max_epochs=EPOCHS, accumulate_grad_batches=2, gradient_clip_val=0.5,
    )  # fmt: skip
    return end.each


class Fails(L.Callback):
    """Fails in some processes after three steps."""

    def __init__(self, ranks: set[int]) -> None:
        self.ranks = ranks

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and rank() in self.ranks:
            raise ValueError("three steps")


class SlowCheckpoint(ModelCheckpoint):
    """Saves later after a failure than Lightning alone would kill the first process, which is after at most 5 s."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if rank() == 0:
            time.sleep(6)
        super().on_exception(trainer, pl_module, exception)


def failed(folder: Path, *failing: str) -> None:
    """Train until these processes fail, with a checkpoint of the failure."""
    module, saves = Net(), SlowCheckpoint(folder, save_on_exception=True)
    torch.manual_seed(rank())
    preset, batches = {"strategy": ENGINES["ddp"], "callback": {"exact_resume": {}}}, DataLoader(Noisy(), batch_size=3)
    callbacks = [Fails({*map(int, failing)}), saves]
    trained(preset, folder, module=module, batches=batches, callbacks=callbacks, enable_checkpointing=True)


def killed(folder: Path, engine: str) -> None:
    """Train until both processes are killed."""
    fitted(folder / "killed", engine, kills=True)


def resumed(folder: Path, engine: str) -> dict[str, Any]:
    """Return the ends of the undisturbed fit, and of those that resume the killed one and the undisturbed one."""
    results = {"whole": fitted(folder / "whole", engine)}
    paths = {f"batch {batch}": folder / "whole" / f"{batch}.ckpt" for batch in SAVED[engine]}
    for name, path in {"killed": folder / "killed" / f"{LAST}.ckpt", **paths}.items():
        results[name] = fitted(None, engine, path=path)
    return results
