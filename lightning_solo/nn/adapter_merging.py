"""Merge adapters into the weights of a module, or take them out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError, NothingToDoError, listed
from lightning_solo.nn.adaptation import (
    adapted_layers,
    adapter_configs,
    adapter_modules,
    adapter_names,
    adapter_parameters,
    child_places,
)
from lightning_solo.nn.adapted import plain
from lightning_solo.nn.adapter_targets import OPTION
from lightning_solo.nn.quantized import weights_in

MOST, MOST_ROUNDED = 1e-3, 5e-2
"""Largest relative difference of a layer's outputs by merging, in fp32, and in bf16 and fp16."""


def remove_adapters(module: nn.Module) -> None:
    """Take all adapters out of a module, which then computes as before they were put in; same objects, same keys.

    Raises:
        ConflictError: an adapter was made by PiSSA, which moves a part of each weight into its factors.
        NothingToDoError: there are no adapters.
    """
    _require(module)
    if moved := [name for name, config in adapter_configs(module).items() if config.method == "pissa"]:
        raise ConflictError(
            f"the adapter {moved[0]!r} was made by PiSSA, which has moved a part of each weight into its factors, so"
            " the weights alone are not those of the module; write solo.merge_adapters(module)"
        )
    _take_out(module)


def merge(module: nn.Module) -> dict[str, float]:
    """Add the active adapter to the weights, in fp32 and rounded once to their type, and take all adapters out.

    Returns:
        Qualified name of each layer -> largest difference of its outputs for random inputs, before and after merging,
        relative to the largest output.

    Raises:
        ConflictError: a weight is in 4 or 8 bits, an adapter isn't finite, or a layer would compute other outputs;
            nothing is changed then.
        NothingToDoError: there are no adapters.
    """
    _require(module)
    for name, layer in adapted_layers(module).items():
        if weights_in(plain(layer)):
            raise ConflictError(
                f"{name} has its weight in 4 or 8 bits, which can't hold the sum with an adapter: merging would change"
                " the outputs by as much as the adapter does; merge into a module with plain weights"
            )
    if wrong := [key for key, p in adapter_parameters(module).items() if not bool(torch.isfinite(p).all())]:
        raise ConflictError(f"the adapter has values that aren't finite ({listed(wrong)}); merge another checkpoint")
    layers = {layer: name for name, layer in adapted_layers(module).items()}  # of several names of a layer one
    differences = {name: _merge_layer(copy.deepcopy(layer)) for layer, name in layers.items()}
    for layer, name in layers.items():
        most = MOST_ROUNDED if _weight_of(layer).dtype in (torch.bfloat16, torch.float16) else MOST
        if not differences[name] <= most:
            raise ConflictError(
                f"{name}, a {type(plain(layer)).__name__}, would compute other outputs with the merged weight, by"
                f" {differences[name]:.1e} of the largest: it uses its weight in its own way; keep the adapters"
                f" ({OPTION}.after_fit=keep), or train with {OPTION}.targets that leave it out"
            )
    for layer in layers:
        _merge_layer(layer)
    for _, wrapper in adapter_modules(module):
        rows: Any = wrapper._modules.get("token_adapter")
        if rows is not None and rows.tied_adapter is None:
            for name in rows.active_adapters:
                weight = rows.base_layer.weight.data
                weight[rows.token_indices[name]] = rows.trainable_tokens_delta[name].data.to(weight)
    _take_out(module)
    return differences


@torch.no_grad()
def _merge_layer(layer: Any) -> float:
    base: Any = plain(layer)
    was_training = layer.training
    layer.eval()
    inputs = _inputs_of(base)
    before = _output(layer(*inputs))
    parts = (
        [(base, "in_proj_weight"), (plain(base.out_proj), "weight")]
        if isinstance(base, nn.MultiheadAttention)
        else [(base, "weight")]
    )
    weights: list[Any] = [part._parameters[key] for part, key in parts]
    types = [p.dtype for p in weights]
    for p in weights:
        p.data = p.data.to(torch.float32, copy=True)  # peft adds in place, and others may share the numbers
    own = {name for table in layer.adapter_layer_names for name in getattr(layer, table)}
    layer.merge(adapter_names=[name for name in layer.active_adapters if name in own])
    for (part, key), p, dtype in zip(parts, weights, types, strict=True):
        merged = getattr(part, key)
        p.data = merged.data.to(dtype)
        vars(part).pop(key, None)
        part._parameters[key] = p
    if isinstance(base, nn.MultiheadAttention):
        base.out_proj = cast("Any", plain(base.out_proj))
    after = _output(base(*inputs))
    layer.train(was_training)
    return float((after.float() - before.float()).abs().max() / before.float().abs().max().clamp(min=1e-30))


def _output(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _weight_of(layer: nn.Module) -> Tensor:
    base: Any = plain(layer)
    weight: Tensor = base.in_proj_weight if isinstance(base, nn.MultiheadAttention) else base.weight
    return weight


def _inputs_of(base: Any) -> tuple[Tensor, ...]:
    """Return random inputs of a layer, the same each time."""
    weight = _weight_of(base)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    if isinstance(base, nn.Embedding):
        rows = torch.randint(base.num_embeddings, (64,), generator=generator)
        return (rows.to(weight.device),)
    if isinstance(base, nn.modules.conv._ConvNd):
        size = [(k - 1) * d + 3 for k, d in zip(base.kernel_size, base.dilation, strict=True)]
        return (normal(2, base.in_channels, *size),)
    if isinstance(base, nn.MultiheadAttention):
        return (normal(2, 4, base.embed_dim),) * 3
    return (normal(16, weight.shape[1] if isinstance(base, nn.Linear) else weight.shape[0]),)


def _require(module: nn.Module) -> None:
    if not adapter_names(module):
        raise NothingToDoError(f"{type(module).__name__} has no adapters")


def _take_out(module: nn.Module) -> None:
    for parent, key, child in child_places(module):
        if plain(child) is not child:
            parent._modules[key] = plain(child)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer) and part.activation_relu_or_gelu == 0:
            kinds = {nn.functional.relu: 1, nn.functional.gelu: 2}
            part.activation_relu_or_gelu = kinds.get(part.activation, 0)


def merge_summary(differences: Mapping[str, float]) -> str:
    """Return a line about what `merge` returned."""
    worst = max(differences, key=differences.__getitem__)
    return (
        f"adapters: merged into the weights of {len(differences)} layers; largest relative difference of a layer's"
        f" outputs {differences[worst]:.1e} ({worst})"
    )
