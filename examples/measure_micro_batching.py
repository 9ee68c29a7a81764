"""What `micro_batching` costs a step in which nothing runs out of memory and the batch isn't split.

python examples/measure_micro_batching.py --write examples/results/micro_batching_cpu.json

Two fits, with and without it, take turns in one process, batch by batch, so that both see the same machine. A step is
all that Lightning's loop does from the end of one batch to the end of the next, in seconds of the fit's own thread:
those in which others have the core don't count. A figure is the median over pairs of steps of what the one took more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import lightning as L
import torch
import torchmetrics
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo

CLASSES = 10
WARM_UP = 10  # steps of a fit that don't count: the first ones copy all buffers


class Fit(L.LightningModule):
    """A classification by any network, whose loss and accuracy are logged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits.detach(), batch[1])
        self.log("loss", loss)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Attending(nn.Module):
    """A transformer over (batch, sequence, width), with a table of positions and a mask as buffers of each block."""

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True) for _ in range(blocks)
        )
        for block in self.blocks:
            block.register_buffer("mask", torch.zeros(length, length))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, block.mask)
        return self.head(x.mean(1))


def perceptron() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, CLASSES)), torch.randn(160, 512)


def transformer() -> tuple[nn.Module, Tensor]:
    return Attending(width=16, blocks=18, length=8), torch.randn(1, 8, 16)


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [part for _ in range(53) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    return nn.Sequential(*layers, *head), torch.randn(1, 4, 8, 8)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": perceptron,
    "transformer": transformer,
    "convolutions and BatchNorm": convolutions,
}


class Turns(L.Callback):
    """Lets fits in threads take turns, batch by batch, and notes the seconds of each one's own thread.

    Args:
        mine: held while this fit runs.
        next_one: given to the other fit at the end of a batch.
    """

    def __init__(self, mine: Semaphore, next_one: Semaphore) -> None:
        self.mine, self.next_one = mine, next_one
        self.seconds: list[float] = []

    def on_train_start(self, *args: Any) -> None:
        self.mine.acquire()
        self.began = time.thread_time()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.thread_time() - self.began)
        self.next_one.release()
        self.mine.acquire()
        self.began = time.thread_time()

    def on_train_end(self, *args: Any) -> None:
        self.next_one.release()


def fit(make: Callable[[], tuple[nn.Module, Tensor]], steps: int, callbacks: list[L.Callback]) -> None:
    """Train a model for so many steps."""
    net, batch = make()
    rows = batch.repeat(steps, *[1] * (batch.dim() - 1))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Fit(net), DataLoader(TensorDataset(rows, torch.zeros(len(rows), dtype=torch.long)), len(batch)))


def measured(name: str, steps: int) -> dict[str, Any]:
    """Return what a model has, and what its step takes with and without micro-batching."""
    make = MODELS[name]
    first, second = Semaphore(1), Semaphore(0)
    plain, ours = Turns(first, second), Turns(second, first)
    fits = [[plain], [solo.MicroBatching(batch_norm="ghost"), ours]]
    threads = [Thread(target=fit, args=(make, steps, callbacks)) for callbacks in fits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = list(zip(ours.seconds, plain.seconds, strict=True))[WARM_UP:]
    differences = [more - less for more, less in pairs]
    low, middle, high = statistics.quantiles(differences, n=4)
    net, _ = make()
    return {
        "model": name,
        "modules": sum(1 for _ in net.modules()),
        "parameter_tensors": sum(1 for _ in net.parameters()),
        "buffers": sum(1 for _ in net.buffers()),
        "step_ms": round(statistics.median(less for _, less in pairs) * 1e3, 2),
        "more_us": round(middle * 1e6),
        "quartiles_us": [round(low * 1e6), round(high * 1e6)],
    }


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000, help="steps of a fit")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        rows.append(measured(name, arguments.steps))
        print(rows[-1], flush=True)
    result = {
        "machine": machine(),
        "versions": versions(),
        "command": "python examples/measure_micro_batching.py --write examples/results/micro_batching_cpu.json",
        "steps": arguments.steps,
        "load": round(os.getloadavg()[0], 1),
        "rows": rows,
    }
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
