"""A fine-tuned language model from a checkpoint, as it was at the end of training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import CheckpointError
from lightning_solo.export.adapter_files import load_adapters
from lightning_solo.export.sources import read
from lightning_solo.fine_tuning.causal_lm import QUANTIZED, HFCausalLM
from lightning_solo.nn.adapter_weights import RECORD
from lightning_solo.nn.quantized import quantize, quantized, quantized_weights_of


def load_trained(checkpoint: Path, device: torch.device) -> tuple[HFCausalLM, Any]:
    """Return (module, tokenizer) of a checkpoint, in evaluation mode.

    Weights that were in 4 or 8 bits are so again, since the adapters were trained on the rounded ones.

    Args:
        checkpoint: of a fit of `HFCausalLM`, with the adapters alone or with all weights.
        device: where the module is to be.

    Raises:
        CheckpointError: the file is damaged or of another module, or the folder of its base isn't there.
    """
    content = read(checkpoint, inert=True)
    arguments = content.get("hyper_parameters", {})
    names = inspect.signature(HFCausalLM).parameters
    if "path" not in arguments or not {*arguments} <= {*names}:
        raise CheckpointError(
            f"{checkpoint}: it is of no causal language model from a folder; write the run of a model=hf_causal_lm, as"
            " in experiment=sft"
        )
    module = HFCausalLM(**{**arguments, "samples": 0, "early_stopping": None})
    module.configure_model()
    _quantize(module, content.get(QUANTIZED, {}), device)
    if RECORD in content:
        load_adapters(module, checkpoint)
    else:
        module.load_state_dict(content["state_dict"])
    chosen = {"tokenizer": module.path, **content.get("datamodule_hyper_parameters", {})}
    tokenizer = tokenizer_of(chosen["tokenizer"], chosen.get("chat_template"), chosen.get("new_tokens", ()))
    return module.to(device).eval(), tokenizer


def _quantize(module: nn.Module, formats: Mapping[str, tuple[str, str]], device: torch.device) -> None:
    """Quantize the weights of these names, unless they are so already."""
    before = quantized_weights_of(module)
    by_tensor: dict[int, Any] = {}  # tied weights stay tied
    by_part: dict[str, dict[str, Any]] = {}
    for name in [name for name in formats if name not in before]:
        (form, dtype), (prefix, _, own) = formats[name], name.rpartition(".")
        p = module.get_parameter(name).requires_grad_(False)
        if id(p) not in by_tensor:
            by_tensor[id(p)] = quantized(p.detach().to(getattr(torch, dtype)), form, device)
        by_part.setdefault(prefix, {})[own] = by_tensor[id(p)]
    for prefix, weights in by_part.items():
        quantize(module.get_submodule(prefix), weights)
