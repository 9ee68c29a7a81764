"""The configuration of a model of transformers from which channels or heads were removed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lightning_solo.errors import ConflictError

_CHANNELS = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "hidden_dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "encoder_attention_heads")


def smaller_config(model: Any, weights: Mapping[str, Tensor], structure: Mapping[str, Any]) -> Any:
    """Return the model's configuration, with the widths and numbers of heads of its pruned weights.

    Args:
        model: of which the configuration is, as it was before channels or heads were removed.
        weights: state dict of the model, with smaller shapes.
        structure: record of what was removed.

    Raises:
        ConflictError: the layers have different sizes, or the model's class can't have these.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    inputs = {kind: {tuple(sizes) for sizes in layers.values()} for kind, layers in structure["inputs"].items()}
    width, heads = getattr(text, "hidden_size", 0), getattr(text, "num_attention_heads", 1)
    if getattr(text, "n_inner", 0) is None:  # GPT-2's, by default four times its width
        text.n_inner = 4 * width
    for before, after in inputs.get("channels", ()):
        for name in _CHANNELS:
            if getattr(text, name, None) == before:
                setattr(text, name, after)
    for before, after in inputs.get("heads", ()):
        text.head_dim = getattr(text, "head_dim", None) or width // heads
        for name in dict.fromkeys(text.attribute_map.get(name, name) for name in _HEADS):
            number = Fraction(after, before) * (getattr(text, name, None) or 0)
            if number and number.denominator == 1:  # one head of keys for all isn't removed
                setattr(text, name, int(number))
    if not _has_shapes(model, config, weights):
        raise ConflictError(
            f"format='hf': {type(model).__name__} can't have the sizes that callback.pruning left: config.json has one"
            " width and one number of heads for all layers, and not every class takes any number of heads; write"
            " --format pruned (in Python solo.export_pruned)"
        )
    return config


def _has_shapes(model: Any, config: Any, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a configuration's model has the shapes of weights."""
    try:
        with torch.device("meta"):
            own = type(model)(copy.deepcopy(config)).state_dict()
    except (ValueError, RuntimeError, TypeError):  # sizes that the class refuses
        return False
    return all(own[name].shape == value.shape for name, value in weights.items() if name in own)
