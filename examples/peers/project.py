"""The user's project before any peer: a small Llama with random weights, and windows of Python's own sources as bytes.

Every script beside this file trains this model on these batches; `examples/compare_peers.py` sets the sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_solo.reference.stdlib_text import read_splits, windows

WIDTH, DEPTH, CONTEXT, BATCH, STEPS, SEED = 256, 4, 128, 8, 100, 1
CLIP = 1.0  # norm of the gradients
ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "eps": 1e-6,
}  # with 1e-8 torchao's 8-bit AdamW diverges
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model() -> LlamaForCausalLM:
    """Return the model, with the same weights at each call."""
    torch.manual_seed(SEED)
    shape = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": DEPTH, "vocab_size": 256}
    heads = {"num_attention_heads": WIDTH // 64, "max_position_embeddings": CONTEXT, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of the text, in a random order that is the same for all scripts."""

    def __init__(self) -> None:
        rows = windows(read_splits(4_000_000)[0], CONTEXT)
        self.rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.rows[index, :CONTEXT].long()
        return {"input_ids": tokens, "labels": tokens}


def loader() -> DataLoader[dict[str, Tensor]]:
    """Return the batches, in order."""
    return DataLoader(Windows(), batch_size=BATCH)


def seen(loss: Tensor) -> None:
    """Take a loss, in scripts that never call the model itself. `examples/compare_peers.py` replaces this function."""
