"""Count the bytes of each optimizer's states, by name: of a byte GPT of 10.8 million parameters, after one step.

`python examples/measure_optimizers.py --write examples/results/optimizers_cpu.json`
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
from lightning_solo.presets.registry import NAMES
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.reference.stdlib_text import StdlibText


def state_bytes(name: str) -> dict[str, float]:
    """Return bytes of states per parameter: of the whole model, and of its largest matrix."""
    sizes: dict[torch.Tensor, int] = {}

    class Count(L.Callback):
        """Counts the states after the step."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            for p in parameters_of(optimizer):
                states = (value for value in optimizer.state[p].values() if isinstance(value, torch.Tensor))
                sizes[p] = sum(value.nbytes for value in states if value.dim())  # a step count is one number

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, limit_val_batches=0, enable_model_summary=False,
        callbacks=[solo.OptimizerReplacement(optimizer=name, lr=1e-4), Count()], **quiet,
    )  # fmt: skip
    module = ByteGPT(width=384, depth=6, heads=6, warmup_steps=0)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    trainer.fit(module, StdlibText(context=128, batch_size=2))
    largest = max(sizes, key=torch.Tensor.numel)
    return {
        "all": sum(sizes.values()) / sum(p.numel() for p in sizes),
        "matrix": sizes[largest] / largest.numel(),
    }


def main() -> None:
    """Print a line for each optimizer, and write them on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows: list[dict[str, Any]] = [{"name": name, **state_bytes(name)} for name in NAMES["optimizer"]]
    for row in rows:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.write:
        command = f"python examples/measure_optimizers.py --write {arguments.write}"
        result = {"command": command, "machine": machine(), "versions": versions(), "rows": rows}
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
