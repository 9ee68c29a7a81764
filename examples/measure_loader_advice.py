"""Compare what `LoaderAdvice` says an option would save at most with what the option then saves.

Loaders that sleep, steps that sleep: one fit with the observer, and for each option that it names another fit with that
option. Savings are shares of the time per batch of the first fit, the first batch left out; with caching, of the epochs
behind the first. The last row of the output is what the observer itself costs per batch.
`python examples/measure_loader_advice.py --write examples/results/loader_advice_cpu.json`
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import lightning_solo as solo
from lightning_solo.techniques.loader_advice.times import Watch

BATCH = 4


class Slow(Dataset[Tensor]):
    """Items that take a while, as from a disk or a network; cached ones none."""

    def __init__(self, batches: int, seconds: float, cached: bool = False) -> None:
        self.items = batches * BATCH
        self.seconds = 0.0 if cached else seconds / BATCH

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Tensor:
        if self.seconds:  # sleeping for none would hand the core to others
            time.sleep(self.seconds)
        return torch.full((64,), float(index))


class SlowCollation:
    """A collate function that takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, samples: list[Tensor]) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return default_collate(samples)


class Step(L.LightningModule):
    """A step that takes a while, as on a device that the host waits for."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net = nn.Linear(64, 1)
        self.seconds = seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        return self.net(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


# seconds per batch of the items, of collation, of the step; batches of an epoch; epochs; options of the loader
CASES: dict[str, dict[str, Any]] = {
    "slow items": {"items": 0.040, "collation": 0.0, "step": 0.025, "batches": 60, "epochs": 2},
    "slow collation": {"items": 0.0, "collation": 0.015, "step": 0.025, "batches": 60, "epochs": 2},
    "items slower than one worker": {
        "items": 0.040, "collation": 0.0, "step": 0.025, "batches": 60, "epochs": 2,
        "num_workers": 1, "persistent_workers": True,
    },
    "short epochs": {
        "items": 0.010, "collation": 0.0, "step": 0.025, "batches": 5, "epochs": 12, "num_workers": 2,
    },
    "nothing to do": {"items": 0.0, "collation": 0.0, "step": 0.025, "batches": 60, "epochs": 2},
}  # fmt: skip


def observed(case: dict[str, Any], *callbacks: L.Callback, cached: bool = False, **options: Any) -> solo.LoaderAdvice:
    """Return the observer of a fit, with more options of the loader."""
    known = {key: case[key] for key in ("num_workers", "persistent_workers") if key in case}
    data = DataLoader(
        Slow(case["batches"], case["items"], cached),
        batch_size=BATCH,
        collate_fn=SlowCollation(case["collation"]),
        **{**known, **options},
    )
    observer = solo.LoaderAdvice()
    L.Trainer(
        accelerator="cpu", max_epochs=case["epochs"], callbacks=[observer, *callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Step(case["step"]), data)  # fmt: skip
    return observer


def per_batch(observer: solo.LoaderAdvice) -> float:
    """Return the seconds of a batch."""
    assert observer.times is not None
    return observer.times.total_s / observer.times.batches


def measure() -> list[dict[str, Any]]:
    """Return a row for each option that is named in one of the cases."""
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        before = observed(case)
        row = {"case": name, "batch_ms": round(1000 * per_batch(before), 2)}
        advised = [saving for saving in before.savings if saving.share >= before.min_share]
        for saving in advised:
            workers = int(found[0]) if (found := re.findall(r"num_workers=(\d+)", saving.write)) else 0
            applied: dict[str, Callable[[], solo.LoaderAdvice]] = {
                "num_workers": lambda case=case, workers=workers: observed(case, num_workers=workers),
                "persistent_workers": lambda case=case: observed(case, persistent_workers=True),
                "caching": lambda case=case: observed(case, cached=True),
                "prefetch": lambda case=case: observed(case, solo.Prefetch()),
            }
            achieved = 1 - per_batch(applied[saving.option]()) / per_batch(before)
            rows.append({**row, "write": saving.write, "at_most": round(saving.share, 4), "saved": round(achieved, 4)})
        if not advised:
            rows.append({**row, "write": None, "at_most": 0.0, "saved": 0.0})
    for row in rows:
        print(row)
    return rows


def cost_us(batches: int = 20_000) -> float:
    """Return the microseconds that the observer takes of each batch."""
    watch = Watch(torch.device("cpu"), starts_workers=False, loads_here=True)
    move = watch.copying(lambda batch: batch)
    started = time.perf_counter()
    for _ in range(batches):
        watch.begin_wait()
        watch.collating(len, ())
        watch.end_wait()
        move(None)
        watch.end_batch()
    return 1e6 * (time.perf_counter() - started) / batches


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    result = {"machine": machine(), "versions": versions(), "rows": measure(), "cost_us": round(cost_us(), 1)}
    print(f"the observer takes {result['cost_us']} us per batch")
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
