"""Measures what products in low precision do to the loss: a byte GPT against `bf16`, the same seeds, on a CPU.

All but int8 is emulated there: factors are rounded as on a GPU, and multiplied in bf16; fp16_accumulate rounds its sums
to fp16 as well. int8 is multiplied in integers, as on a GPU.

    python examples/measure_low_precision.py --write examples/results/low_precision_cpu.json
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from this_machine import machine, versions

FORMATS = (
    "float8_tensorwise",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "mxfp8",
    "nvfp4",
    "int8",
    "fp16_accumulate",
)
SEEDS, STEPS = (1, 2, 3), 150
MODEL: dict[str, Any] = {"width": 64, "depth": 2, "heads": 2, "context": 64}


def held_out_loss(format: str | None, seed: int) -> float:
    """Return the loss on held-out text after training in a format, None for plain bf16; computed in fp32."""
    import lightning as L
    import torch

    import lightning_solo as solo
    from lightning_solo.reference.byte_gpt import ByteGPT
    from lightning_solo.reference.stdlib_text import StdlibText

    L.seed_everything(seed, verbose=False)
    module = ByteGPT(**MODEL, optimizer=partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95)))
    data = StdlibText(context=MODEL["context"], batch_size=8, max_bytes=1_000_000)
    callbacks = [] if format is None else [solo.LowPrecisionMatmul(format, allow_cpu=True)]
    trainer = L.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        callbacks=callbacks,
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    module.eval()
    losses = []
    with torch.no_grad():
        for number, batch in enumerate(StdlibText(context=64, batch_size=64, max_bytes=1_000_000).val_dataloader()):
            if number == 8:
                break
            logits = module(batch[:, :-1].long())
            losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].long().flatten()))
    return float(torch.stack(losses).mean())


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=None)
    arguments = parser.parse_args()
    rows = []
    for name in (None, *FORMATS):
        losses = [round(held_out_loss(name, seed), 5) for seed in SEEDS]
        rows.append({"format": name or "bf16", "held_out": losses})
        print(json.dumps(rows[-1]), flush=True)
    if arguments.write is not None:
        result = {
            "machine": machine(),
            "versions": versions(),
            "command": "python examples/measure_low_precision.py --write examples/results/low_precision_cpu.json",
            "model": MODEL,
            "steps": STEPS,
            "seeds": list(SEEDS),
            "rows": rows,
        }
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
