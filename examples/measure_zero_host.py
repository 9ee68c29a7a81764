"""Measures what DeepSpeed's engine takes in memory on the CPU, beside what `zero_layout` predicts for it.

On a CPU engine "device" and "host" are the same memory. Each row is a fresh process: resident memory before the engine
is made, the peak while it is made, the peak while it trains (Linux, /proc), and the bytes of every tensor that lives
between two steps, counted exactly.

    python examples/measure_zero_host.py                    # all rows, to examples/results/zero_host_cpu.json
    python examples/measure_zero_host.py --width 512 --out /tmp/zero.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lightning_solo.zero.layout import ZeroSettings, zero_layout

GIB = 2**30
ROWS = [
    {"stage": stage, "precision": precision, "accumulation": accumulation, "offload_parameters": offload}
    for stage, offload in ((2, False), (3, False), (3, True))
    for precision in ("32-true", "bf16-mixed")
    for accumulation in (1, 4)
]


def status(name: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def forget_peak() -> None:
    """Reset the peak of resident memory, VmHWM."""
    Path("/proc/self/clear_refs").write_text("5")


def tensor_bytes() -> int:
    """Return the bytes of all tensors of this process, a storage counted once."""
    import torch

    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a row."""
    zero: dict[str, Any] = {
        "stage": row["stage"],
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": row["reduce_bucket"],
        "allgather_bucket_size": row["reduce_bucket"],
    }
    if row["offload_parameters"]:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": row["accumulation"],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **({"bf16": {"enabled": True}} if row["precision"].startswith("bf16") else {}),
    }


def settings_of(row: dict[str, Any]) -> ZeroSettings:
    """Return the same row as `zero_layout` takes it."""
    return ZeroSettings(
        stage=row["stage"],
        precision=row["precision"],
        accumulates=row["accumulation"] > 1,
        offload_parameters=row["offload_parameters"],
        reduce_bucket=row["reduce_bucket"],
        cuda=False,
    )


def measure(row: dict[str, Any]) -> dict[str, Any]:
    """Make the engine, train three optimizer steps in this process, and return what memory that took."""
    import deepspeed
    import torch

    from lightning_solo.zero.process import ONE_PROCESS, open_process_group

    warnings.simplefilter("ignore")
    os.environ.update(ONE_PROCESS)
    open_process_group("gloo")

    def train(module: torch.nn.Module, steps: int) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config_of(row))[0]
        made = status("VmHWM")
        forget_peak()
        dtype, width = next(module.parameters()).dtype, module[0].in_features
        for _ in range(steps * row["accumulation"]):
            engine.backward(engine(torch.ones(1, width, dtype=dtype)).float().sum())
            engine.step()
        return engine, made, status("VmHWM")

    # What the libraries load when first used is not the engine's.
    train(torch.nn.Sequential(torch.nn.Linear(8, 8)), 1)
    module = torch.nn.Sequential(*[torch.nn.Linear(row["width"], row["width"]) for _ in range(row["layers"])])
    layout = zero_layout([[p.numel() for p in module.parameters()]], settings_of(row))
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    other = tensor_bytes() - weights
    before = status("VmRSS") - weights
    forget_peak()
    _engine, made, peak = train(module, 3)  # held, or its tensors are gone
    return {
        "tensors_bytes": tensor_bytes() - other,
        "predicted_tensors_bytes": layout.kept_bytes,
        "start_bytes": made - before,
        "predicted_start_bytes": layout.start_bytes,
        "peak_bytes": peak - before,
        "predicted_peak_bytes": layout.kept_bytes + max(layout.in_backward_bytes, layout.in_step_bytes),
        "parts": {"device": dict(layout.device), "host": dict(layout.host)},
    }


def in_fresh_process(row: dict[str, Any]) -> dict[str, Any]:
    """Measure a row in a child process; its result is a file, since stage 3 on the CPU aborts at the exit."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--row", json.dumps(row), "--out", str(result)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if not result.is_file():
            return {**row, "failed": done.stderr.strip()[-300:]}
        return {**row, **json.loads(result.read_text())}


def main() -> None:
    """Measure and print every row, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--reduce-bucket", type=int, default=5_000_000)
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "zero_host_cpu.json")
    arguments = parser.parse_args()
    if arguments.row:
        arguments.out.write_text(json.dumps(measure(arguments.row)))
        return
    size = {"width": arguments.width, "layers": arguments.layers, "reduce_bucket": arguments.reduce_bucket}
    rows = []
    for row in ROWS:
        measured = in_fresh_process({**row, **size})
        rows.append(measured)
        if "failed" in measured:
            print(row, measured["failed"])
            continue
        print(*row.values(), end=" ")
        for what in ("tensors", "start", "peak"):
            is_, said = measured[f"{what}_bytes"], measured[f"predicted_{what}_bytes"]
            print(f"| {what} {is_ / GIB:.3f} said {said / GIB:.3f} GiB ({said / is_ - 1:+.1%})", end=" ")
        print(flush=True)
    from importlib.metadata import version

    versions = {name: version(name) for name in ("torch", "deepspeed")}
    arguments.out.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
