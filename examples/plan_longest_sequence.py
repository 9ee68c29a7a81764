"""Plans the longest sequences that Llama-shaped models of 3 and 8 billion parameters train with on an H200.

Full fine-tuning with AdamW, one sequence per micro-batch; the weights are never made. A length is said to fit after it
was planned and does; one that is 3 % or 1,024 tokens longer was planned too, and doesn't.

    pip install transformers
    python examples/plan_longest_sequence.py     # to examples/results/longest_sequence.json, half an hour
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from this_machine import machine, versions
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_solo.planner.plan import Plan
from lightning_solo.planner.preset_plans import plan
from lightning_solo.units import KiB

DEVICE = "h200"
VOCABULARY = 128_256
SHAPES: dict[str, dict[str, Any]] = {
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
CHUNKS = "callback.chunked_cross_entropy.chunk_tokens=8192"
LONG, TILED = ("long_context", "compact"), (CHUNKS, "+callback=tiled_mlp", "callback.tiled_mlp.tile_tokens=32768")
CASES: dict[str, tuple[str, Sequence[str], Sequence[str], int]] = {  # shape, presets, overrides, tokens that fit
    "3b, plain bf16-mixed": ("3b", ("bf16",), (), 4 * KiB),
    "3b, long_context": ("3b", ("long_context",), (CHUNKS,), 64 * KiB),
    "8b, long_context, compact, tiled_mlp, states on the host": (
        "8b",
        LONG,
        (*TILED, "callback.compact_states.state_budget=0"),
        256 * KiB,
    ),
}


class Llama(L.LightningModule):
    """A language model of Llama's architecture, with AdamW."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2**21, use_cache=False, **SHAPES[shape])
        self.net = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def planned(shape: str, presets: Sequence[str], overrides: Sequence[str], tokens: int) -> Plan:
    """Return the plan for one sequence."""
    batch = torch.zeros(1, tokens, dtype=torch.int64)
    found = plan(
        partial(Llama, shape), batch, preset=list(presets), overrides=overrides, device=DEVICE, host_memory="1024GiB",
        timeout_s=3600,
    )  # fmt: skip
    print(f"{shape} {'+'.join(presets)} {tokens:,}: {found.verdict}, {found.needed_bytes / 2**30:.1f} GiB", flush=True)
    return found


def longest(name: str) -> dict[str, Any]:
    """Return the longest sequence of a case that fits, in tokens, with its plan's figures."""
    shape, presets, overrides, first = CASES[name]
    plans = {tokens: planned(shape, presets, overrides, tokens) for tokens in (first, 2 * first)}
    while True:
        fitting = max(tokens for tokens, each in plans.items() if each.fits)
        too_long = min((tokens for tokens, each in plans.items() if not each.fits), default=None)
        if too_long is not None and too_long <= max(1.03 * fitting, fitting + KiB):
            break
        one, other = sorted(plans)[-2:] if too_long is None else (fitting, too_long)
        per_token = (plans[other].needed_bytes - plans[one].needed_bytes) / (other - one)
        tokens = fitting + (plans[fitting].budget_bytes - plans[fitting].needed_bytes) / per_token
        tokens = int(tokens * (1 if too_long is None else 0.99)) // KiB * KiB
        if tokens in plans:  # the plan for one more step of 1,024 tokens is missing
            tokens = fitting + KiB
        plans[tokens] = planned(shape, presets, overrides, tokens)
    best = plans[fitting]
    return {
        "presets": presets,
        "overrides": overrides,
        "tokens": fitting,
        "needed_bytes": best.needed_bytes,
        "host_bytes": best.host_bytes,
        "seconds_per_step": round(best.seconds_per_step, 1),
    }


def main() -> None:
    """Plan and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results" / "longest_sequence.json"
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--output", type=Path, default=results)
    arguments = parser.parse_args()
    output: Path = arguments.output
    cases = json.loads(output.read_text(encoding="utf-8"))["cases"] if output.exists() else {}
    command = "python examples/plan_longest_sequence.py"
    for name in arguments.cases:
        cases[name] = longest(name)
        record = {"command": command, "device": DEVICE, "machine": machine(), "versions": versions(), "cases": cases}
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
