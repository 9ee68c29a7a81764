"""Measure AdamW's step on the host: DeepSpeed's C++ version against torch's, on one flat tensor as ZeRO has it.

A figure is the median over several steps, the versions taking turns, in milliseconds per step.
`OMP_NUM_THREADS=2 python examples/measure_host_optimizers.py --out examples/results/host_optimizers_cpu.json`
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_solo.zero.extension import load_extension

HYPER = {"lr": 1e-3, "weight_decay": 0.01}


def deepspeeds(parameters: list[nn.Parameter]) -> Optimizer:
    """Return DeepSpeed's version."""
    load_extension("cpu_adam")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: Optimizer = DeepSpeedCPUAdam(parameters, **HYPER)
    return made


VERSIONS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "DeepSpeedCPUAdam": deepspeeds,
    "torch AdamW (default)": lambda parameters: AdamW(parameters, **HYPER),
    "torch AdamW (foreach=True)": lambda parameters: AdamW(parameters, foreach=True, **HYPER),
    "torch AdamW (fused=True)": lambda parameters: AdamW(parameters, fused=True, **HYPER),
}


def measure(elements: int, steps: int) -> dict[str, Any]:
    """Return milliseconds per step of every version, and how far the parameters ended from torch's default."""
    gradient, start = torch.randn(elements), torch.randn(elements)
    parameters = {label: nn.Parameter(start.clone()) for label in VERSIONS}
    optimizers = {label: make([parameters[label]]) for label, make in VERSIONS.items()}
    times: dict[str, list[float]] = {label: [] for label in VERSIONS}
    for number in range(steps + 1):
        for label, optimizer in optimizers.items():
            parameters[label].grad = gradient
            started = time.perf_counter()
            optimizer.step()
            if number:  # the first makes the states
                times[label].append((time.perf_counter() - started) * 1e3)
    reference = parameters["torch AdamW (default)"].detach()
    return {
        label: {
            "median_ms": round(statistics.median(times[label]), 1),
            "fastest_ms": round(min(times[label]), 1),
            "slowest_ms": round(max(times[label]), 1),
            "largest_difference": (parameters[label].detach() - reference).abs().max().item(),
        }
        for label in VERSIONS
    }


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
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "host_optimizers_cpu.json")
    parser.add_argument("--elements", type=int, default=50_000_000, help="fp32 parameters, in one tensor")
    parser.add_argument("--steps", type=int, default=15, help="steps; a figure is their median")
    arguments = parser.parse_args()
    results = measure(arguments.elements, arguments.steps)
    table = Table("version", "median ms", "fastest ms", "slowest ms", "largest difference", title="A step of AdamW")
    for label, found in results.items():
        figures = (f"{found[key]:.1f}" for key in ("median_ms", "fastest_ms", "slowest_ms"))
        table.add_row(label, *figures, f"{found['largest_difference']:.1e}")
    Console(width=120).print(table)
    report = {
        "command": " ".join(["python", "examples/measure_host_optimizers.py", *sys.argv[1:]]),
        "hardware": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "deepspeed")}},
        "elements": arguments.elements,
        "steps": arguments.steps,
        "optimizers": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
