"""Measures in how many steps and tokens a byte GPT comes to a loss on held-out text, with and without a curriculum.

Windows are all of one length; paragraphs, between empty lines, are padded. Each run has the same learning rates, the
same number of steps, and a curriculum for the first third of them. The target is the loss that all runs without one
have come to after four fifths of their steps. Tokens are the bytes that are predicted.

    python examples/measure_curriculum.py --write examples/results/curriculum_cpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from this_machine import machine, versions
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.reference.stdlib_text import read_splits, spread, windows

SEEDS, STEPS, DURATION, EVERY = (1, 2, 3), 600, 200, 20
CONTEXT, BATCH, MAX_BYTES = 128, 16, 1_000_000
MODEL: dict[str, Any] = {"width": 64, "depth": 2, "heads": 2, "context": CONTEXT, "warmup_steps": 30}


class Padded(ByteGPT):
    """A byte GPT whose loss leaves out zeros, with which paragraphs are padded."""

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten().long(), ignore_index=0)


def compressed(item: Tensor) -> int:
    """Return by how many bytes a window can be written: a difficulty that needs no model."""
    return len(zlib.compress(item.numpy().tobytes()))


CURRICULA: dict[str, list[tuple[str, dict[str, Any] | None]]] = {
    "windows": [
        ("none", None),
        ("sequence length, linear", {"by": "sequence_length"}),
        ("sequence length, root", {"by": "sequence_length", "schedule": "root"}),
        ("loss, of the untrained model", {"by": "loss"}),
        ("compressed size, root", {"by": compressed, "schedule": "root"}),
    ],
    "paragraphs": [
        ("none", None),
        ("length, linear", {"by": "length"}),
        ("length, root", {"by": "length", "schedule": "root"}),
    ],
}


def items_of(kind: str, split: int) -> Any:
    """Return windows of the text, or its paragraphs of at most a window."""
    text = read_splits(MAX_BYTES)[split]
    if kind == "windows":
        return windows(text, CONTEXT)
    parts = bytes(text.tolist()).split(b"\n\n")
    return [torch.tensor(list(part[: CONTEXT + 1])) for part in parts if len(part) >= 16]


class Watch(L.Callback):
    """Counts what is predicted, and measures the loss on held-out text."""

    def __init__(self, held_out: list[Tensor]) -> None:
        self.held_out = held_out
        self.tokens = 0
        self.curve: list[tuple[int, int, float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self.tokens += int((batch[:, 1:] != 0).sum())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % EVERY == 0:
            pl_module.eval()
            with torch.no_grad():
                loss = float(torch.stack([pl_module.loss(batch) for batch in self.held_out]).mean())
            pl_module.train()
            self.curve.append((trainer.global_step, self.tokens, loss))


def curve(kind: str, settings: dict[str, Any] | None, seed: int) -> list[tuple[int, int, float]]:
    """Return steps, tokens and held-out loss along a run."""
    L.seed_everything(seed, verbose=False)
    make = ByteGPT if kind == "windows" else Padded
    module = make(**MODEL, optimizer=partial(torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.95)))
    collate = None if kind == "windows" else partial(pad_sequence, batch_first=True)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(items_of(kind, 0), BATCH, shuffle=True, drop_last=True, collate_fn=collate, generator=generator)
    held_out = items_of(kind, 1)
    held_out = spread(held_out, 256) if kind == "windows" else held_out[:: max(1, len(held_out) // 256)][:256]
    watch = Watch(list(DataLoader(held_out, 64, collate_fn=collate)))  # type: ignore[arg-type]
    curriculum = [] if settings is None else [solo.Curriculum(duration=DURATION, seed=seed, **settings)]
    trainer = L.Trainer(
        accelerator="cpu", max_steps=STEPS, callbacks=[*curriculum, watch], limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    return watch.curve


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments = parser.parse_args()
    rows = []
    for kind, curricula in CURRICULA.items():
        target = 0.0
        for name, settings in curricula:
            curves = [curve(kind, settings, seed) for seed in arguments.seeds]
            if settings is None:
                target = math.ceil(100 * max(c[4 * len(c) // 5 - 1][2] for c in curves)) / 100
            reached = [next((point for point in c if point[2] <= target), (None, None, None)) for c in curves]
            row = {
                "items": kind,
                "target": target,
                "curriculum": name,
                "steps": [point[0] for point in reached],
                "tokens": [point[1] for point in reached],
                "at_end": [round(c[-1][2], 4) for c in curves],
                "tokens_at_end": [c[-1][1] for c in curves],
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.write is not None:
        result = {
            "machine": machine(),
            "versions": versions(),
            "command": "python examples/measure_curriculum.py --write examples/results/curriculum_cpu.json",
            "model": MODEL,
            "batch_size": BATCH,
            "max_steps": STEPS,
            "duration": DURATION,
            "start": 0.1,
            "seeds": list(arguments.seeds),
            "rows": rows,
        }
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
