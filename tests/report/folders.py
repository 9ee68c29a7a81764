"""Folders as runs, sweeps and ladders leave them, written by hand."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_solo.sweeps import results
from lightning_solo.sweeps.results import Row
from lightning_solo.units import GiB

CATEGORIES = ("weights", "gradients", "optimizer_states", "activations", "temporaries", "other")
HOSTILE = "<script>hacked=1</script><img src=x onerror=hacked=1>\"'`${1}"


def write_csv(path: Path, columns: Mapping[str, Sequence[object]]) -> Path:
    """Write columns of equal length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def make_run(folder: Path, steps: int = 100, spike: float = 99.0) -> Path:
    """Write a run with a loss that has one spike, memory by category, step times and a configuration."""
    numbers, draw = range(steps), random.Random(0)
    loss = [5.0 - 4.0 * step / steps + draw.random() / 10 for step in numbers]
    loss[steps // 3] = spike
    metrics = {
        "epoch": [0] * steps,
        "step": numbers,
        "train/loss": loss,
        "validation/loss": [loss[step] if step % max(1, steps // 10) == 0 else "" for step in numbers],
        "throughput/tokens_per_s": [1000 + step % 7 for step in numbers],
        "throughput/step_s": [0.1 + draw.random() / 100 for _ in numbers],
    }
    write_csv(folder / "csv" / "metrics.csv", metrics)
    memory: dict[str, Sequence[object]] = {
        "fit": ["a"] * steps, "stage": ["fit"] * steps, "device": ["cuda:0"] * steps, "epoch": [0] * steps,
        "step": numbers, "allocated_bytes": [2 * GiB + step for step in numbers],
    }  # fmt: skip
    for n, category in enumerate(CATEGORIES):
        memory[f"{category}_bytes"] = [(n + 1) * GiB + draw.randrange(GiB) for _ in numbers]
    write_csv(folder / "csv" / "memory.csv", memory)
    (folder / "config.yaml").write_text(f"model:\n  width: 64\nnote: '{HOSTILE}'\n", encoding="utf-8")
    return folder


def make_row(number: int, **given: Any) -> Row:
    """Return a finished job; the later, the lower its loss and the more memory and time it took."""
    usual: dict[str, Any] = {
        "overrides": ("model.width=8", f"optimizer.lr={number}"), "status": "finished", "folder": f"elsewhere/{number}",
        "returned": 5.0 - number, "metrics": {"throughput/tokens_per_s": 1000.0 * (number + 1)}, "steps": 10,
        "seconds": 10.0 + number, "peak_host_bytes": GiB, "peak_device_bytes": (number + 1) * GiB,
        "hardware": "a GPU", "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    return Row(number, **{**usual, **given})


def make_sweep(folder: Path, rows: Sequence[Row]) -> Path:
    """Write a sweep of jobs, each with the metrics of a short run."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        results.append(folder / "results.jsonl", row)
        losses = {"step": range(5), "train/loss": [6.0 - row.number - step / 10 for step in range(5)]}
        write_csv(folder / str(row.number) / "csv" / "metrics.csv", losses)
    (folder / "multirun.yaml").write_text("hydra:\n  sweep:\n    dir: x\nmodel:\n  width: 8\n", encoding="utf-8")
    return folder


def ladder_row(name: str, peak: int | None, step_s: float | None, **more: Any) -> dict[str, Any]:
    """Return a row of a ladder."""
    found = {"name": name, "status": "finished", "peak_bytes": peak, "step_s": step_s, "loss": 3.0}
    return {**found, "loss_difference": 0.0, "exact": True, **more}


def make_ladder(folder: Path, *more: dict[str, Any]) -> Path:
    """Write a ladder of a baseline, a technique that halves its memory, and one that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        ladder_row("baseline", 8 * GiB, 0.2),
        ladder_row("checkpointing", 4 * GiB, 0.25),
        ladder_row(HOSTILE, None, None, status="out of device memory", exact=None),
        *more,
    ]
    told = {
        "rows": rows,
        "baseline": "baseline",
        "hardware": "a GPU",
        "versions": {"torch": "2"},
        "command": "ladder x",
    }
    (folder / "ladder.json").write_text(json.dumps(told), encoding="utf-8")
    return folder
