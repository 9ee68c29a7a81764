"""Measure how long steps wait for their batches, with and without prefetching.

A loader without workers sleeps for a share of a step in each batch, and a step sleeps; the seconds are those that
Lightning's own profiler sees in the training loop's `next`.
`python examples/measure_prefetch.py --write examples/results/prefetch_cpu.json`
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import SimpleProfiler
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_solo as solo

STEP_S = 0.050
SHARES = (0.4, 0.8, 0.95)
FETCH = "[_TrainingEpochLoop].train_dataloader_next"
UNCOUNTED = 2  # batches that the training thread loads itself, at the start of a fit


class Slow(Dataset[Tensor]):
    """Samples whose loading takes a while, as from a disk or a network."""

    def __init__(self, batches: int, seconds: float) -> None:
        self.batches = batches
        self.seconds = seconds

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((64,), float(index))


class Step(L.LightningModule):
    """A step that takes a while, as on a device that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        return self.net(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def waited(share: float, batches: int, callbacks: list[L.Callback]) -> float:
    """Return the seconds waited for data, as a share of the step."""
    profiler = SimpleProfiler()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, profiler=profiler, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Step(), DataLoader(Slow(batches, share * STEP_S), batch_size=1))
    seconds = profiler.recorded_durations[FETCH][UNCOUNTED:batches]
    return statistics.mean(seconds) / STEP_S


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        row: dict[str, Any] = {"loading": share}
        for name, callbacks in (("plain", []), ("prefetch", [solo.Prefetch()])):
            row[name] = round(waited(share, arguments.batches, callbacks), 4)
        rows.append(row)
        print(row)
    result = {
        "machine": machine(),
        "versions": versions(),
        "step_s": STEP_S,
        "batches": arguments.batches,
        "rows": rows,
    }
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
