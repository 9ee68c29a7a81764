"""Plans which language model one card fine-tunes, and how: README's table "which model on which card".

The models have the shapes of Llama 3.2 (1B, 3B), Llama 3.1 (8B, 70B) and Qwen 3 (14B, 32B); a batch is one
sequence of 2,048 tokens. Blocks are recomputed, logits computed in chunks, and the optimizer is AdamW. Each plan traces
an optimizer step on tensors without data; a model is said to fit if it leaves 5 % of the card's memory.

    pip install transformers peft bitsandbytes
    python examples/plan_fine_tuning.py     # to examples/results/fine_tuning_plans.json, half an hour
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from this_machine import machine, versions
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_solo as solo

TOKENS = 2048
HOST = "1TiB"
# vocabulary, width, feed-forward width, blocks, heads, heads of keys and values, output head tied to the embedding
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "1B": (128_256, 2048, 8192, 16, 32, 8, True),
    "3B": (128_256, 3072, 8192, 28, 24, 8, True),
    "8B": (128_256, 4096, 14_336, 32, 32, 8, False),
    "14B": (151_936, 5120, 17_408, 40, 40, 8, False),
    "32B": (151_936, 5120, 25_600, 64, 64, 8, False),
    "70B": (128_256, 8192, 28_672, 80, 64, 8, False),
}
CHUNKS = ["+callback=chunked_cross_entropy", "callback.chunked_cross_entropy.chunk_tokens=256"]
TABLES = ["callback.quantized_base.embeddings=host", "callback.quantized_base.head=int8"]
# name -> presets, overrides, models that are planned
WAYS: dict[str, tuple[list[str], list[str], tuple[str, ...]]] = {
    "full": (["bf16", "checkpointing"], CHUNKS, ("1B", "3B", "8B")),
    "compact": (["compact_checkpointing"], CHUNKS, ("1B", "3B", "8B", "14B")),
    "stream": (["stream_checkpointing"], CHUNKS, ("8B", "14B", "32B", "70B")),
    "adapters": (["adapters", "checkpointing"], [*CHUNKS, "precision=bf16-mixed"], tuple(SHAPES)),
    "qlora": (["qlora"], CHUNKS, tuple(SHAPES)),
    "qlora, smaller": (["qlora"], [*CHUNKS, *TABLES], ("8B", "14B", "32B", "70B")),
    "qlora_streamed": (["qlora_streamed"], CHUNKS, tuple(SHAPES)),
    "qlora_streamed, smaller": (["qlora_streamed"], [*CHUNKS, *TABLES], ("8B", "14B", "32B", "70B")),
}
CARDS = {"8 GB": 8, "12 GB": 12, "16 GB": 16, "24 GB": 24, "32 GB": 32, "48 GB": 48, "80 GB": 80, "141 GB": 131}
"""Name of a card -> GiB that its driver shows, at least."""


class LanguageModel(L.LightningModule):
    """A Llama of random weights, fine-tuned with AdamW."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        vocabulary, width, inner, blocks, heads, groups, tied = SHAPES[name]
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=blocks,
            num_attention_heads=heads, num_key_value_heads=groups, head_dim=128 if width > 2048 else 64,
            max_position_embeddings=8192, tie_word_embeddings=tied, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM._from_config(config, dtype=dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of (batch, sequence) token numbers."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def planned(model: str, presets: list[str], overrides: list[str], tokens: int = TOKENS) -> dict[str, Any]:
    """Return the bytes of one plan; weights that AdamW updates itself are in fp32."""
    dtype = torch.float32 if presets == WAYS["full"][0] else torch.bfloat16
    batch = torch.zeros(1, tokens, dtype=torch.int64)
    found = solo.plan(
        partial(LanguageModel, model, dtype), batch, preset=presets, overrides=overrides, device="h200",
        host_memory=HOST, timeout_s=7200, budget="1GiB",  # in which none fits: no other batch sizes are traced
    )  # fmt: skip
    return {
        "model": model, "tokens": tokens, "peak_bytes": found.peak_bytes, "needed_bytes": found.needed_bytes,
        "host_bytes": found.host_bytes, "breakdown": found.breakdown,
    }  # fmt: skip


def main() -> None:
    """Plan, and write the file after each plan; rows of other ways stay in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results" / "fine_tuning_plans.json"
    parser.add_argument("--output", type=Path, default=results)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    before = json.loads(arguments.output.read_text(encoding="utf-8"))["plans"] if arguments.output.exists() else []
    plans = [row for row in before if row["way"] not in arguments.ways]
    for way in arguments.ways:
        presets, overrides, models = WAYS[way]
        cases = [(model, TOKENS) for model in models]
        if presets == ["qlora_streamed"]:
            cases.append(("8B", 512))
        for model, tokens in cases:
            row = {"way": way, "presets": presets, "overrides": overrides}
            plans.append({**row, **planned(model, presets, overrides, tokens)})
            print(f"{way} {model}: {plans[-1]['needed_bytes'] / 2**30:.2f} GiB", flush=True)
            record = {
                "command": "python examples/plan_fine_tuning.py", "device": "h200", "machine": machine(),
                "versions": versions(), "cards": CARDS,
                "plans": sorted(plans, key=lambda row: list(WAYS).index(row["way"])),
            }  # fmt: skip
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
