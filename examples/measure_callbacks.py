"""Measure what the observers cost: microseconds per hook, and the share of a 10 ms training step.

Runs a small training on the CPU with one callback at a time, whose every hook is timed from outside; a figure is the
median over several runs. `python examples/measure_callbacks.py --out examples/results/callbacks_cpu.json`

With `--in-all` it prints what a batch takes more of CPU time in a fit with the callback than in one without, the median
over pairs of fits: with what Lightning does to call it, and what it puts around Lightning's own work.

With `--presets` it measures presets on a module of 24 small tensors, whose steps wait for the host on a GPU, and writes
`examples/results/presets_cpu.json`. Each fit under a preset follows a plain one of the same precision; the figure of a
fit is the median CPU time of its batches, in one thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo
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
WIDTH, BLOCKS = 64, 6  # each block has four tensors


@dataclass(frozen=True)
class Compared:
    """A preset, and the plain fit that it is compared with."""

    preset: str
    plain: dict[str, Any]
    overrides: Sequence[str] = ()
    forwards: int = 1  # in the plain fit
    batches: int = 1  # in a step


PRESETS = {
    "compact": Compared("compact", {"precision": "bf16-true"}),
    "gradient_release": Compared("gradient_release", {"precision": "bf16-mixed"}),
    "checkpointing, above another forward": Compared(
        "checkpointing", {"precision": "bf16-mixed"}, ["~callback.memory_logger"], forwards=2
    ),
    "micro_batching, the batch whole": Compared("micro_batching", {"precision": "bf16-mixed"}),
    "accumulation, two batches": Compared(
        "accumulation",
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
        ["callback.accumulation_schedule.milestones=[[0,2]]"],
        batches=2,
    ),
    "baseline, which has the guard alone": Compared("baseline", {"precision": "32-true"}),
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


class Block(nn.Module):
    """A block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Blocks(LightningModule):
    """A regression by a module of 24 small tensors, which may run its forward several times."""

    def __init__(self, forwards: int) -> None:
        super().__init__()
        self.blocks, self.forwards = nn.Sequential(*(Block() for _ in range(BLOCKS))), forwards

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for _ in range(self.forwards):
            found = self.blocks(batch[0])
        return nn.functional.mse_loss(found, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Collects the CPU time at the start of each batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.process_time())


def batch_ms(steps: int, one: Compared, forwards: int, options: Mapping[str, Any]) -> float:
    """Return the median CPU time of a batch in milliseconds, without the first tenth of the steps."""
    torch.manual_seed(0)
    count = steps * one.batches * 8
    data, clock = TensorDataset(torch.randn(count, WIDTH), torch.randn(count, WIDTH)), Clock()
    callbacks = [*options.get("callbacks", ()), clock]
    fixed = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(**{**fixed, **quiet, **options, "callbacks": callbacks})
        trainer.fit(Blocks(forwards), DataLoader(data, batch_size=8))
    times = clock.times[:: one.batches][steps // 10 :]
    return statistics.median(after - before for before, after in pairwise(times)) * 1e3 / one.batches


def measure_presets(steps: int, pairs: int) -> dict[str, Any]:
    """Return what a batch takes more of CPU time under each preset than in a plain fit, in milliseconds."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    results: dict[str, Any] = {}
    for name, one in PRESETS.items():
        plain, more = [], []
        for _ in range(pairs):
            plain.append(batch_ms(steps, one, one.forwards, one.plain))
            under = solo.trainer_kwargs(one.preset, [*one.overrides])
            more.append(batch_ms(steps, one, 1, under) - plain[-1])
        low, middle, high = (round(each, 2) for each in statistics.quantiles(more, n=4))
        results[name] = {"plain_ms": round(statistics.median(plain), 2), "more_ms": middle, "quartiles_ms": [low, high]}
        print(f"{name}: {middle:+.2f} ms (quartiles {low:+.2f} and {high:+.2f}) on {results[name]['plain_ms']:.2f} ms")
    return results


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report(arguments: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures with the command, the hardware and the versions."""
    return {
        "command": " ".join(["python", "examples/measure_callbacks.py", *sys.argv[1:]]),
        "hardware": {"cpu": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "lightning", "torchmetrics")},
        },
        "steps": arguments.steps,
        "runs": arguments.runs,
        **figures,
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file to write; by default in examples/results")
    parser.add_argument("--steps", type=int, default=500, help="steps in a run")
    parser.add_argument("--runs", type=int, default=5, help="runs, or pairs of runs; a figure is their median")
    parser.add_argument("--in-all", action="store_true", help="print what a batch takes more of CPU time, nothing else")
    parser.add_argument("--presets", action="store_true", help="measure presets on a module of small tensors instead")
    arguments = parser.parse_args()
    results = Path(__file__).parent / "results"
    if arguments.in_all:
        measure_in_all(arguments.steps, 4 * arguments.runs)
        return
    if arguments.presets:
        presets = measure_presets(arguments.steps, arguments.runs)
        write(arguments.out or results / "presets_cpu.json", report(arguments, {"presets": presets}))
        return
    callbacks = measure(arguments.steps, arguments.runs)
    table = Table("callback", "hook", "median us", "mean us", "slowest us", "% of 10 ms", title="Cost per hook")
    for label, result in callbacks.items():
        for name, hook in result["hooks"].items():
            table.add_row(
                label,
                name,
                *(f"{hook[key]:.2f}" for key in ("median_us", "mean_us", "slowest_us", "share_of_step_percent")),
            )
        table.add_row(label, "all", "", "", "", f"{result['share_of_10_ms_step_percent']:.2f}", end_section=True)
    Console(width=140).print(table)
    write(arguments.out or results / "callbacks_cpu.json", report(arguments, {"callbacks": callbacks}))


if __name__ == "__main__":
    main()
