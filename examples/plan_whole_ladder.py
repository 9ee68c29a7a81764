"""Plans what all memory techniques save together: one after another, on a GPT with a vocabulary of 32k and context 2k.

Bytes are those that tensors take on an H200 at the peak of an optimizer step: model states, gradients, activations,
logits, counted operator by operator on tensors without data. Validation losses are those of a small GPT, trained for
real on this machine without any technique and with all of them, from the same three seeds.

    pip install transformers
    python examples/plan_whole_ladder.py     # to examples/results/whole_ladder.json, ten minutes
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from this_machine import machine, versions
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_solo as solo

DEVICE = "h200"
SEQUENCES, CONTEXT, VOCABULARY = 8, 2048, 32_768
SHAPE = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 768, "n_layer": 12, "n_head": 12}
SMALL = {"vocab_size": 1024, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
TARGET = 20
CHUNKS = "callback.chunked_cross_entropy.chunk_tokens=256"
LONG = ["checkpointing", "chunked_cross_entropy", "offloading"]
RUNGS: dict[str, tuple[list[str], list[str]]] = {  # name -> presets, overrides
    "baseline": (["baseline"], []),
    "bf16": (["bf16"], []),
    "+ checkpointing": (["bf16", "checkpointing"], []),
    "+ chunked_cross_entropy": (["bf16", "checkpointing", "chunked_cross_entropy"], [CHUNKS]),
    "+ offloading": (["bf16", *LONG], [CHUNKS]),
    "+ tiled_mlp": (["bf16", *LONG], [CHUNKS, "+callback=tiled_mlp"]),
    "+ compact": ([*LONG, "compact"], [CHUNKS, "+callback=tiled_mlp"]),
    "+ states on the host": (
        [*LONG, "compact_host"],
        [CHUNKS, "+callback=tiled_mlp", "callback.compact_states.state_budget=0"],
    ),
}
SEEDS, STEPS, BATCH = (1, 2, 3), 60, 4
TRAINED = ["long_context", "compact_host"]
ON_CPU = ["callback.activation_offloading.allow_cpu=true", "callback.activation_offloading.min_offload_bytes=4096"]


class GPT(L.LightningModule):
    """GPT-2 of a shape, with AdamW."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        self.net = GPT2LMHeadModel(GPT2Config(**shape, **dropout, use_cache=False))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rungs() -> Iterator[dict[str, Any]]:
    """Yield the peak of each rung, and what it is made of."""
    for name, (presets, overrides) in RUNGS.items():
        batch = torch.zeros(SEQUENCES, CONTEXT, dtype=torch.int64)
        found = solo.plan(
            partial(GPT, SHAPE), batch, preset=presets, overrides=overrides, device=DEVICE, host_memory="256GiB"
        )
        print(f"{name}: {found.peak_bytes / 2**20:,.0f} MiB", found.breakdown, flush=True)
        yield {"name": name, "peak_bytes": found.peak_bytes, "breakdown": found.breakdown, "host": found.host_bytes}


def words() -> Tensor:
    """Return Python's standard library as numbers of its most frequent words: (words,)."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))[:60])
    found = re.findall(r"\w+|\W", text)
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(SMALL["vocab_size"] - 1))}
    return torch.tensor([numbers.get(word, SMALL["vocab_size"] - 1) for word in found])


def validation_loss(tokens: Tensor, seed: int, *, everything: bool) -> float:
    """Return the loss on the last tenth of the text, after training on the rest."""
    sequences = tokens.unfold(0, SMALL["n_positions"], SMALL["n_positions"])
    last = len(sequences) // 10
    order = torch.Generator().manual_seed(seed)
    training = DataLoader(sequences[:-last], BATCH, shuffle=True, generator=order)  # type: ignore[arg-type]
    validation = DataLoader(sequences[-last:][:64], batch_size=16)  # type: ignore[arg-type]
    kwargs = solo.trainer_kwargs(TRAINED, ON_CPU) if everything else {"devices": 1}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(**{**kwargs, **quiet, "enable_model_summary": False}, accelerator="cpu", max_steps=STEPS)
    L.seed_everything(seed, verbose=False)
    module = GPT(SMALL)
    trainer.fit(module, training)
    loss: float = trainer.validate(module, validation, verbose=False)[0]["loss"]
    return loss


def main() -> None:
    """Plan, train, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results" / "whole_ladder.json"
    parser.add_argument("--output", type=Path, default=results)
    arguments = parser.parse_args()
    rows = list(rungs())
    tokens = words()
    losses = []
    for seed in SEEDS:
        plain, every = (validation_loss(tokens, seed, everything=everything) for everything in (False, True))
        print(f"seed {seed}: validation loss {plain:.3f}, with everything {every:.3f}", flush=True)
        losses.append({"seed": seed, "plain": round(plain, 4), "everything": round(every, 4)})
    case = {"sequences": SEQUENCES, "context": CONTEXT, **SHAPE}
    record = {
        "command": "python examples/plan_whole_ladder.py", "device": DEVICE, "machine": machine(),
        "versions": versions(), "case": case, "small": {**SMALL, "steps": STEPS}, "target": TARGET,
        "rungs": rows, "losses": losses,
    }  # fmt: skip
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
