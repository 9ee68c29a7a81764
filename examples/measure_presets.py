"""Measures every preset that runs on this machine: peak memory, step time and loss, each run in a fresh process.

The table of README is made from the file that this writes. All presets train the same embedded byte GPT on the same
batches in the same order; each is run several times and the median is kept.

    python examples/measure_presets.py                      # every preset, results to examples/results/
    python examples/measure_presets.py --presets bf16 fp16 --runs 1 --out /tmp/presets.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning_solo.build import check_machine
from lightning_solo.errors import SoloError
from lightning_solo.presets.compose import compose

ORDER = ("baseline", "fp16", "bf16", "bf16_true", "checkpointing", "accumulation", "zero_offload")
PACKAGES = ("torch", "lightning", "deepspeed")
WARM_UP = 5


def measure(preset: str, model: dict[str, int], steps: int) -> dict[str, Any]:
    """Train ``steps`` optimizer steps under a preset in this process and return what it took."""
    import lightning as L
    import torch

    import lightning_solo as solo
    from lightning_solo.memory.reading import read
    from lightning_solo.reference.byte_gpt import ByteGPT
    from lightning_solo.reference.stdlib_text import StdlibText

    class Clock(L.Callback):
        """Seconds of each optimizer step, the device waited for at its end."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.losses: list[float] = []

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.started)
            self.losses.append(float(trainer.callback_metrics["train/loss"]))

    L.seed_everything(0, verbose=False)
    clock = Clock()
    context, batch_size = model["context"], model["batch_size"]
    data = StdlibText(context=context, batch_size=batch_size, max_bytes=4_000_000)
    data.setup("fit")
    module = ByteGPT(width=model["width"], depth=model["depth"], heads=model["heads"], context=context)
    trainer = L.Trainer(
        **solo.trainer_kwargs(preset, callbacks=[clock]),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    before = read(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    trainer.fit(module, data)
    reading = read(trainer.strategy.root_device)
    timed = clock.seconds[WARM_UP:]
    step = statistics.median(timed)
    return {
        "peak_bytes": reading.peak_allocated or reading.peak_resident,
        "before_bytes": before.allocated if before.allocated is not None else before.resident,
        "batch_seconds": step,
        "tokens_per_s": context * batch_size / step,
        "optimizer_steps": trainer.global_step,
        "batches": len(clock.losses),
        "loss": statistics.mean(clock.losses[-5:]),
    }


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run whose step time is the median, with every run's step time beside it."""
    ordered = sorted(runs, key=lambda run: run["batch_seconds"])
    chosen = ordered[len(ordered) // 2]
    return {**chosen, "batch_seconds_of_runs": [run["batch_seconds"] for run in runs]}


def in_fresh_process(arguments: list[str]) -> dict[str, Any]:
    """Run this script for one preset in a child process and return its result."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, where they are installed."""
    there = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: there[name] for name in PACKAGES if name in there}}


def machine() -> str:
    """Return the hardware in words."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU"


def main() -> None:
    """Measure, print and write."""
    import torch

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=ORDER)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--width", type=int, default=1536 if gpu else 384)
    parser.add_argument("--depth", type=int, default=24 if gpu else 6)
    parser.add_argument("--heads", type=int, default=12 if gpu else 6)
    parser.add_argument("--context", type=int, default=1024 if gpu else 256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / f"presets_{'gpu' if gpu else 'cpu'}.json"
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = {name: getattr(given, name) for name in ("width", "depth", "heads", "context", "batch_size")}
    if given.only:
        print(json.dumps(measure(given.only, model, given.steps)))
        return
    rows = []
    for preset in given.presets:
        try:
            check_machine(compose(preset))
        except SoloError as error:
            rows.append({"preset": preset, "not_run": str(error)})
            print(f"{preset:<16}not run here: {error}")
            continue
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in model.items()]
        runs = [in_fresh_process([*sizes, f"--steps={given.steps}", "--only", preset]) for _ in range(given.runs)]
        failed = next((run for run in runs if "failed" in run), None)
        row = {"preset": preset, **(failed or median_of(runs))}
        rows.append(row)
        print(preset, {key: row.get(key) for key in ("peak_bytes", "batch_seconds", "loss", "failed")}, flush=True)
    result = {
        "what": "peak memory, time and loss of each preset",
        "command": " ".join(["python", "examples/measure_presets.py", *sys.argv[1:]]),
        "hardware": machine(),
        "versions": versions(),
        "memory": "bytes allocated on the device, peak" if gpu else "resident set of the process, peak",
        "model": model,
        "steps": given.steps,
        "runs": given.runs,
        "rows": rows,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
