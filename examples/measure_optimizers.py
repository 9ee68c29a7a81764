"""Count the bytes of each optimizer's states, and measure the loss that it reaches in a short run, by name.

Bytes are of a byte GPT of 10.8 million parameters after one step; losses of one of 0.84 million, on held-out text, each
at the best of three learning rates:
`python examples/measure_optimizers.py --steps 200 --write examples/results/optimizers_cpu.json`
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from this_machine import machine, versions

import lightning_solo as solo
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.reference.stdlib_text import StdlibText

RATES = {
    "adamw": 1e-3,
    "sgd": 1e-1,
    "adafactor": 1e-2,
    "lion": 1e-4,
    "muon": 1e-3,
    "adamw_8bit": 1e-3,
    "adamw_4bit": 1e-3,
    "schedule_free_adamw": 2.5e-3,
}
"""Name -> the middle one of three learning rates."""
CONTEXT, BATCH, WARMUP, FACTOR = 128, 16, 20, 3


def fitted(name: str, model: dict[str, Any], lr: float, steps: int) -> tuple[Any, Any]:
    """Return (Trainer, data) after a fit of a byte GPT under an optimizer, with warm-up and a falling rate."""
    L.seed_everything(1, verbose=False)
    schedule = "constant" if name == "schedule_free_adamw" else "cosine"
    technique = solo.OptimizerReplacement(
        optimizer=name, lr=lr, weight_decay=0.1, schedule=schedule, warmup_steps=min(WARMUP, steps - 1)
    )
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, enable_model_summary=False, callbacks=[technique],
        limit_val_batches=0, num_sanity_val_steps=0, **quiet,
    )  # fmt: skip
    data = StdlibText(context=CONTEXT, batch_size=BATCH)
    trainer.fit(ByteGPT(context=CONTEXT, **model), data)
    return trainer, data


def state_bytes(name: str) -> dict[str, float]:
    """Return bytes of states per parameter: of the whole model, and of its largest matrix."""
    trainer, _ = fitted(name, {"width": 384, "depth": 6, "heads": 6}, RATES[name], 1)
    (optimizer,) = trainer.optimizers

    def size(p: torch.Tensor) -> int:
        states = (value for value in optimizer.state[p].values() if isinstance(value, torch.Tensor))
        return sum(value.nbytes for value in states if value.dim())  # a step count is one number

    # schedule-free leaves the average in the module, and keeps the trained weights on the host
    left = {p: p.nbytes for p in parameters_of(optimizer) if "training_weight" in optimizer.state[p]}
    sizes = {p: size(p) - left.get(p, 0) for p in parameters_of(optimizer)}
    largest = max(sizes, key=torch.Tensor.numel)
    return {
        "all": sum(sizes.values()) / sum(p.numel() for p in sizes),
        "matrix": sizes[largest] / largest.numel(),
    }


def loss(name: str, lr: float, steps: int) -> float:
    """Return the loss on held-out text, in nats per byte."""
    trainer, data = fitted(name, {"width": 128, "depth": 4, "heads": 4}, lr, steps)
    judge = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=32
    )
    (result,) = judge.validate(trainer.lightning_module, data, verbose=False)
    return float(result["validation/loss"])


def main() -> None:
    """Print a line for each optimizer, and write them on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="of each run for a loss; 0: only bytes")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = []
    for name, middle in RATES.items():
        row: dict[str, Any] = {"name": name, **state_bytes(name)}
        if arguments.steps:
            losses = {lr: loss(name, lr, arguments.steps) for lr in (middle / FACTOR, middle, middle * FACTOR)}
            row["lr"], row["loss"] = min(losses.items(), key=lambda pair: pair[1])
            row["losses"] = {f"{lr:.2g}": value for lr, value in losses.items()}
        rows.append(row)
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    if arguments.write:
        command = f"python examples/measure_optimizers.py --steps {arguments.steps} --write {arguments.write}"
        result = {"command": command, "machine": machine(), "versions": versions(), "steps": arguments.steps}
        arguments.write.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
