"""Measure what a batch takes more of CPU time with exact_resume, and how much larger a checkpoint is.

Each fit with it follows one without it; the figure of a fit is the CPU time that a tenth of its batches stay below, in
one thread, without that of workers.
`python examples/measure_exact_resume.py --write examples/results/exact_resume_cpu.json`
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_solo as solo


class Items(Dataset[Any]):
    """Rows of 64 numbers; random ones are rolled."""

    def __init__(self, count: int, draws: bool) -> None:
        self.x, self.draws = torch.randn(count, 64), draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index].roll(int(torch.randint(64, ())) + np.random.randint(64)) if self.draws else self.x[index]


class Blocks(L.LightningModule):
    """Six equal blocks with dropout."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()) for _ in range(6)))
        self.times: list[float] = []
        self.path = path

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.times.append(time.process_time())
        return self.blocks(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.times) == 50:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit(steps: int, workers: int, draws: bool, callbacks: list[L.Callback], path: Path) -> float:
    """Return the first decile of the CPU times of batches in microseconds; save a checkpoint at the 50th."""
    torch.manual_seed(0)
    module = Blocks(path)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(Items(8 * steps, draws), 8, shuffle=True, num_workers=workers))
    return statistics.quantiles((after - before for before, after in pairwise(module.times[51:])), n=10)[0] * 1e6


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "amid.ckpt"
        for workers in (0, 2):
            for draws in (False, True):
                plain, more, size = [], [], []
                for _ in range(arguments.pairs):
                    plain.append(fit(arguments.steps, workers, draws, [], path))
                    before = path.stat().st_size
                    more.append(fit(arguments.steps, workers, draws, [solo.ExactResume()], path) - plain[-1])
                    size.append(path.stat().st_size - before)
                low, middle, high = (round(each) for each in statistics.quantiles(more, n=4))
                row = {"workers": workers, "draws": draws, "plain_us": round(statistics.median(plain))}
                rows.append({**row, "more_us": middle, "quartiles_us": [low, high], "bytes": max(size)})
                print(rows[-1])
    result = {"machine": machine(), "versions": versions(), "steps": arguments.steps, "pairs": arguments.pairs}
    if arguments.write is not None:
        arguments.write.write_text(json.dumps({**result, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
