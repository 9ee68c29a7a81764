"""Measure what a batch takes more of CPU time with the guard of loss and gradients, and its share of a 10 ms step.

Each fit with it follows one without it; the figure of a fit is the CPU time that a tenth of its batches stay below, in
one thread: other processes disturb those least.
`python examples/measure_finite_guard.py --write examples/results/finite_guard_cpu.json`
With ``--calls`` it counts calls of Python functions per step instead, which other processes don't disturb.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import statistics
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo
from lightning_solo.cards.phase import Phase
from lightning_solo.seams.technique import Technique

STEP_MS = 10
MODULES = {"24 tensors": (64, 6), "96 tensors": (64, 24), "24 tensors, 1.6M elements": (512, 6)}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "clipped by norm": {"gradient_clip_val": 1.0}}


class Blocks(L.LightningModule):
    """A regression by equal blocks, of four tensors each."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(blocks))
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.blocks(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(L.Callback):
    """Collects the CPU time at the start of each batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.process_time())


def batch_us(steps: int, width: int, blocks: int, callbacks: list[L.Callback], **options: Any) -> float:
    """Return the first decile of the CPU times of batches in microseconds, without the first tenth of the steps."""
    torch.manual_seed(0)
    data, clock = TensorDataset(torch.randn(steps * 8, width), torch.randn(steps * 8, width)), Clock()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[*callbacks, clock], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Blocks(width, blocks), DataLoader(data, batch_size=8))
    batches = [after - before for before, after in pairwise(clock.times[steps // 10 :])]
    return statistics.quantiles(batches, n=10)[0] * 1e6


def calls_per_step(callbacks: list[L.Callback]) -> float:
    """Return the calls of Python functions and built-ins in a step of the first module, by cProfile."""
    counts = []
    for steps in (100, 200):  # the difference has no start and no end
        profile = cProfile.Profile()
        profile.runcall(batch_us, steps, *MODULES["24 tensors"], callbacks)
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    return (counts[1] - counts[0]) / 100


class Nothing(Technique):
    """A technique that does nothing."""

    phase = Phase.OBSERVE

    def _init_state(self) -> None:
        pass


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--calls", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if arguments.calls:
        calls_per_step([solo.FiniteGuard()])  # the first fit imports modules
        plain = calls_per_step([])
        for callback in (L.Callback(), Nothing(), solo.FiniteGuard()):
            print(f"{type(callback).__name__}: {calls_per_step([callback]) - plain:.0f} calls more per step")
        return
    rows: list[dict[str, Any]] = []
    for name, (width, blocks) in MODULES.items():
        for way, options in WAYS.items():
            plain, more = [], []
            for _ in range(arguments.pairs):
                plain.append(batch_us(arguments.steps, width, blocks, [], **options))
                guarded = batch_us(arguments.steps, width, blocks, [solo.FiniteGuard()], **options)
                more.append(guarded - plain[-1])
            low, middle, high = (round(each) for each in statistics.quantiles(more, n=4))
            row = {"module": name, "way": way, "plain_us": round(statistics.median(plain)), "more_us": middle}
            rows.append({**row, "quartiles_us": [low, high], "share_of_step": round(middle / 1e3 / STEP_MS, 4)})
            print(rows[-1])
    result = {"machine": machine(), "versions": versions(), "steps": arguments.steps, "pairs": arguments.pairs}
    if arguments.write is not None:
        arguments.write.write_text(json.dumps({**result, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
