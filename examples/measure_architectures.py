"""Plans every architecture of the transformers library that a small configuration of it trains, against real steps.

    python examples/measure_architectures.py [--only gpt2,vit] [--write examples/results/architectures_cpu.json]

Each is made from its configuration with sizes cut down, with random weights; in a process of its own it trains two
real steps on the CPU and two planned ones. What can't be made so, or doesn't train for real, isn't counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from this_machine import machine, versions
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from lightning_solo.planner.capture import capture

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "d_embed", "emb_dim", "rnn_hidden_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "vocab_size": 99,
    "image_size": 32,
    "patch_size": 8,
    "state_size": 8,
    "num_labels": 3,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "attention_window": 8,
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("text", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("encoder_decoder", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ("image", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ("audio", auto.MODEL_FOR_CTC_MAPPING_NAMES),
]
TIME_S = 90


class Wrapped(L.LightningModule):
    """A model that returns its own loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def small_config(name: str) -> Any:
    """Return a configuration with what sizes it has cut down, also those of its parts."""
    config = transformers.CONFIG_MAPPING[name]()
    for part in [config, *(p for p in vars(config).values() if isinstance(p, transformers.PretrainedConfig))]:
        for key, value in SMALL.items():
            if isinstance(getattr(part, key, None), int) and not isinstance(getattr(part, key), bool):
                with contextlib.suppress(AttributeError):  # made of another one
                    setattr(part, key, value)
        layers = getattr(part, "layer_types", None)
        if isinstance(layers, list):
            with contextlib.suppress(AttributeError):
                part.layer_types = layers[-2:]
        if getattr(part, "is_encoder_decoder", False) and getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = 0
        for key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            if isinstance(getattr(part, key, None), (int, list)):
                setattr(part, key, {"pad_token_id": 0, "decoder_start_token_id": 0}.get(key, 1))
    return config


def batch_of(kind: str, config: Any, size: int = 2) -> dict[str, Tensor]:
    """Return a batch for a kind of model."""
    if kind == "image":
        side = getattr(config, "image_size", 32)
        side = side if isinstance(side, int) else 32
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(size, channels, side, side), "labels": torch.randint(3, (size,))}
    ids = torch.randint(2, 90, (size, 16))
    if kind == "audio":
        return {"input_values": torch.randn(size, 4000), "labels": torch.randint(2, 20, (size, 3))}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def compare(kind: str, name: str, architecture: str) -> dict[str, Any]:
    """Return what real and planned steps hold."""
    config = small_config(name)
    cls = getattr(transformers, architecture)

    def make() -> Wrapped:
        torch.manual_seed(0)
        return Wrapped(cls(config).train())

    batch = batch_of(kind, config)
    try:
        real = capture(make, batch, {}, fake=False, cuda=False).log.peak()[0]
    except Exception as error:
        return {"counted": False, "why": f"{type(error).__name__}: {error}"[:200]}
    started = time.monotonic()
    said: dict[str, Any] = {"counted": True, "real": real}
    for key, cuda in (("cpu", False), ("cuda", True)):
        try:
            trace = capture(make, batch, {}, cuda=cuda)
            said[key] = trace.log.peak()[0]
            said["assumptions"] = trace.assumptions
        except Exception as error:
            import traceback

            said[f"{key}_error"] = f"{type(error).__name__}: {error}"[:300]
            said[f"{key}_where"] = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-4:]
    return {**said, "seconds": round(time.monotonic() - started, 2)}


def apart(kind: str, name: str, architecture: str) -> dict[str, Any]:
    """Return `compare` of a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(TIME_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            found = compare(kind, name, architecture)
        except BaseException as error:
            found = {"counted": False, "why": f"{type(error).__name__}: {error}"[:200]}
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(answer) if answer else {"counted": False, "why": f"ended with {status}"}


def main() -> None:
    """Print a line for each, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="some names, joined by commas")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    only = asked.only.split(",") if asked.only else None
    found: dict[str, Any] = {}
    for kind, mapping in KINDS:
        for name, architecture in mapping.items():
            if only is not None and name not in only:
                continue
            architecture = architecture[0] if isinstance(architecture, (list, tuple)) else architecture
            said = found[f"{kind}/{name}"] = apart(kind, name, architecture)
            if said["counted"]:
                more = said.get("cpu", 0) - said["real"]
                what = said.get("cpu_error") or (f"{more:+d} bytes" if more else "equal")
                print(f"{kind}/{name}: {what} {said.get('cuda_error', '')} {said['seconds']} s", flush=True)
            else:
                print(f"{kind}/{name}: not counted, {said['why'][:100]!r}", flush=True)
    counted = {name: said for name, said in found.items() if said["counted"]}
    traced = [name for name, said in counted.items() if "cuda" in said]
    equal = [name for name, said in counted.items() if said.get("cpu") == said["real"]]
    print(f"{len(found)} tried, {len(counted)} train for real, {len(traced)} traced, {len(equal)} equal to the byte")
    if asked.write:
        summary = {"tried": len(found), "counted": len(counted), "traced": len(traced), "equal": len(equal)}
        about = {"machine": machine(), "versions": {**versions(), "transformers": transformers.__version__}}
        told = {**about, "summary": summary, "architectures": found}
        asked.write.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
