"""Small random models of Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 16, "n_embd": 16, "d_model": 16, "intermediate_size": 32, "d_ff": 32, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "num_hidden_layers": 3, "n_layer": 3, "num_layers": 3, "encoder_layers": 3,
    "decoder_layers": 2, "num_attention_heads": 2, "n_head": 2, "num_heads": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "d_kv": 8, "image_size": 16, "patch_size": 4,
    "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip


def small_config(kind: str, **options: Any) -> Any:
    """Return the configuration of a kind, such as ``Llama``, with `SIZES` as far as it knows them, and options."""
    config = getattr(pytest.importorskip("transformers"), f"{kind}Config")
    aliases = getattr(config, "attribute_map", {})
    known = {*vars(config()), *aliases, "decoder_start_token_id"} - {
        alias for alias, name in aliases.items() if name in options
    }
    return config(**{**{name: size for name, size in SIZES.items() if name in known}, **options})


def small_model(kind: str, task: str = "ForCausalLM", **options: Any) -> Any:
    """Return a model of a kind for a task, such as ``LlamaForCausalLM``; see `small_config`."""
    name = "GPT2LMHeadModel" if kind == "GPT2" else kind + task
    return getattr(pytest.importorskip("transformers"), name)(small_config(kind, **options))


def small_batch(rows: int = 8, tokens: int = 6, words: int = 32) -> dict[str, Tensor]:
    """Return random tokens, (rows, tokens), none of them a special one, and labels for a language model."""
    ids = torch.randint(3, words, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}
