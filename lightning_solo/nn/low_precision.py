"""Multiply the matrices of linear layers in low precision; weights and gradients keep their type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.nn import rounded_products as rounded
from lightning_solo.nn.forwards import record_of, replace_forward

MULTIPLE, LEAST = 16, 32
"""Sizes of a product are multiples of 16, as tensor cores need, and at least 32: ``torch._int_mm`` needs 17 rows."""


@dataclass(frozen=True)
class Product:
    """The product of a layer's input and weight, with the two of its backward."""

    function: Any  # an autograd function
    options: tuple[Any, ...]  # its arguments after the input and the weight
    transposed: bool = False  # whether it takes the weight as (in, out)
    multiple: int = MULTIPLE  # sizes of the factors must be multiples of it

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply (rows, in) and (out, in) to (rows, out), in the type of the rows."""
        product: Tensor = self.function.apply(rows, weight.t() if self.transposed else weight, *self.options)
        return product


def product(kind: str, device: torch.device) -> Product:
    """Return the product of a kind for a device.

    Args:
        kind: ``float8_`` with a recipe of torchao (``tensorwise``, ``rowwise`` or ``rowwise_with_gw_hp``), or
            ``mxfp8``, ``nvfp4``, ``int8``, ``fp16_accumulate``.
        device: a CPU emulates all kinds but int8: it rounds factors as a GPU does, and multiplies in bf16 or fp32.
    """
    emulate = device.type == "cpu"
    if kind == "int8":
        return Product(rounded.RoundedProduct, (rounded.int8_product,) * 3)
    if kind == "fp16_accumulate":
        return Product(rounded.RoundedProduct, (rounded.fp16_product,) * 3)
    if kind == "mxfp8":
        mxfp8 = partial(rounded.mxfp8_product, on_device=not emulate)
        return Product(rounded.RoundedProduct, (mxfp8,) * 3, multiple=rounded.MX_BLOCK)
    if kind == "nvfp4":
        nvfp4 = rounded.nvfp4_products(on_device=not emulate)
        return Product(rounded.RoundedProduct, nvfp4, multiple=2 * rounded.NVFP4_BLOCK)  # rows of 16 bytes
    from torchao.float8 import float8_linear
    from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
    from torchao.float8.config import Float8LinearConfig

    if not emulate:
        _patch_inductor_min_max_codegen()  # as torchao's own conversion does: Triton miscompiles without
    config = replace(Float8LinearConfig.from_recipe_name(kind.removeprefix("float8_")), emulate=emulate)
    layer = float8_linear.Float8Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", config=config)
    return Product(float8_linear.matmul_with_hp_or_float8_args, (layer.linear_mm_config, config), transposed=True)


def linear_layers(
    blocks: Mapping[str, nn.Module], multiple: int = MULTIPLE
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return name -> linear layer in blocks, and name -> sizes of layers that aren't multiples of ``multiple``.

    Subclasses of ``nn.Linear`` with another forward are left out.
    """
    layers: dict[str, nn.Linear] = {}
    reasons: dict[str, str] = {}
    for block_name, block in blocks.items():
        for below, layer in block.named_modules():
            name = f"{block_name}.{below}" if below else block_name
            if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
                continue
            if any(size % multiple or size < LEAST for size in (layer.in_features, layer.out_features)):
                reasons[name] = f"{layer.in_features} x {layer.out_features}"
            elif "forward" not in vars(layer):
                layers[name] = layer
    return layers, reasons


def multiply_in_low_precision(layers: Iterable[nn.Linear], product: Product) -> None:
    """Make layers multiply by a product in training mode; ``restore_forwards(layers, Product)`` undoes it."""
    for layer in layers:
        replace_forward(layer, forward, product)


def forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """Run a linear layer: (..., in) -> (..., out), in autocast's type if it is enabled."""
    multiply = record_of(layer, Product)
    if multiply is None or not layer.training or not input.numel():
        return nn.Linear.forward(layer, input)
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    rows = input.reshape(-1, layer.in_features)
    with torch.autocast(device, enabled=False):
        missing = max(-len(rows) % multiply.multiple, LEAST - len(rows))
        # rows of zeros change no scale and no gradient
        padded = nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        output = multiply(padded, layer.weight)[: len(rows)]
        if layer.bias is not None:
            output = output + layer.bias.to(output.dtype)
    return output.reshape(*input.shape[:-1], layer.out_features)
