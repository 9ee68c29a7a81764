"""Measure what the observers cost: microseconds per hook, and the share of a 10 ms training step.

Runs a small training on the CPU with one callback at a time, whose every hook is timed from outside; a figure is the
median over several runs. `python examples/measure_callbacks.py --out examples/results/callbacks_cpu.json`

With `--in-all` it prints what a batch takes more of CPU time in a fit with the callback than in one without, the median
over pairs of fits: with what Lightning does to call it, and what it puts around Lightning's own work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.memory_logger.technique import MemoryLogger
from lightning_solo.techniques.throughput.technique import Throughput

STEP_S = 0.010
CALLBACKS = {
    "MemoryLogger()": lambda: MemoryLogger(table=False),
    "MemoryLogger(per_phase=True)": lambda: MemoryLogger(per_phase=True, table=False),
    "Throughput()": Throughput,
    "AccumulationSchedule([[0, 2], [50, 4]], by='step')": lambda: AccumulationSchedule([[0, 2], [50, 4]], by="step"),
}
# Callbacks, and what the Trainer has in a fit without them, so that both take as many steps.
IN_ALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "MemoryLogger()": (CALLBACKS["MemoryLogger()"], {}),
    "Throughput()": (Throughput, {}),
    "AccumulationSchedule([[0, 2]])": (lambda: AccumulationSchedule([[0, 2]]), {"accumulate_grad_batches": 2}),
}
# Called for each batch, or each of its phases; what comes once in a fit does not weigh on a step.
BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Model(LightningModule):
    """A small regression; its own speed does not enter the figures."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def time_hooks(callback: Callback) -> dict[str, list[float]]:
    """Wrap the batch hooks that a callback overrides; returns where their seconds will be collected."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, hook: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                seconds[name].append(time.perf_counter() - started)

        return call

    for name in BATCH_HOOKS:
        if getattr(type(callback), name) is not getattr(Callback, name):
            setattr(callback, name, timed(name, getattr(callback, name)))
    return seconds


def train(steps: int, **options: Any) -> float:
    """Train ``steps`` batches; return the seconds of CPU time that the fit takes."""
    data = TensorDataset(torch.randn(steps * 8, 64), torch.randn(steps * 8, 1))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        module, loader = Model(), DataLoader(data, batch_size=8)
        started = time.process_time()
        trainer.fit(module, loader)
        return time.process_time() - started


def run(make: Any, steps: int) -> dict[str, dict[str, float]]:
    """Train ``steps`` batches; return per hook its median and mean microseconds, and the share of a step."""
    callback = make()
    seconds = time_hooks(callback)
    train(steps, callbacks=[callback])
    return {
        name: {
            "median_us": statistics.median(times) * 1e6,
            "mean_us": statistics.fmean(times) * 1e6,
            "slowest_us": max(times) * 1e6,  # the call that writes to the loggers and the file
            "share_of_step_percent": sum(times) / steps / STEP_S * 100,
        }
        for name, times in seconds.items()
    }


def measure(steps: int, runs: int) -> dict[str, Any]:
    """Return the median over ``runs`` runs of every figure, per callback and hook."""
    results: dict[str, Any] = {}
    for label, make in CALLBACKS.items():
        found = [run(make, steps) for _ in range(runs)]
        hooks = {
            name: {key: round(statistics.median(one[name][key] for one in found), 3) for key in found[0][name]}
            for name in found[0]
        }
        share = statistics.median(sum(hook["share_of_step_percent"] for hook in one.values()) for one in found)
        results[label] = {"hooks": hooks, "share_of_10_ms_step_percent": round(share, 3)}
    return results


def measure_in_all(steps: int, pairs: int) -> None:
    """Print what a batch takes more with a callback, in microseconds of CPU time."""
    for label, (make, without) in IN_ALL.items():
        more = [train(steps, callbacks=[make()]) - train(steps, **without) for _ in range(pairs)]
        quartiles = [round(each / steps * 1e6) for each in statistics.quantiles(more, n=4)]
        print(f"{label}: {quartiles[1]} us a batch (quartiles {quartiles[0]} and {quartiles[2]}, {pairs} pairs)")


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "callbacks_cpu.json")
    parser.add_argument("--steps", type=int, default=500, help="batches in a run")
    parser.add_argument("--runs", type=int, default=5, help="runs; a figure is their median")
    parser.add_argument("--in-all", action="store_true", help="print what a batch takes more of CPU time, nothing else")
    arguments = parser.parse_args()
    if arguments.in_all:
        measure_in_all(arguments.steps, 4 * arguments.runs)
        return
    results = measure(arguments.steps, arguments.runs)
    table = Table("callback", "hook", "median us", "mean us", "slowest us", "% of 10 ms", title="Cost per hook")
    for label, result in results.items():
        for name, hook in result["hooks"].items():
            table.add_row(
                label,
                name,
                *(f"{hook[key]:.2f}" for key in ("median_us", "mean_us", "slowest_us", "share_of_step_percent")),
            )
        table.add_row(label, "all", "", "", "", f"{result['share_of_10_ms_step_percent']:.2f}", end_section=True)
    Console(width=140).print(table)
    report = {
        "command": " ".join(["python", "examples/measure_callbacks.py", *sys.argv[1:]]),
        "hardware": {"cpu": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "lightning", "torchmetrics")},
        },
        "steps": arguments.steps,
        "runs": arguments.runs,
        "callbacks": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
