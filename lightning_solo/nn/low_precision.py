"""Multiply the matrices of linear layers in 8 bits, forward and backward; weights and gradients keep their type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLE, LEAST = 16, 32
"""Sizes of a product are multiples of 16, as tensor cores need, and at least 32: ``torch._int_mm`` needs 17 rows."""
_PRODUCT = "_low_precision"  # the attribute in a layer's __dict__ that holds its Product


@dataclass(frozen=True)
class Product:
    """The product of a layer's input and weight, and the two of its backward.

    Attributes:
        function: an autograd function.
        options: its arguments after the input and the weight.
        transposed: whether it takes the weight as (in, out).
    """

    function: Any
    options: tuple[Any, ...]
    transposed: bool

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return (rows, out) of (rows, in) and (out, in), in the type of the rows."""
        product: Tensor = self.function.apply(rows, weight.t() if self.transposed else weight, *self.options)
        return product


class Int8Product(torch.autograd.Function):
    """(rows, in) x (out, in) -> (rows, out) in int8, with a scale per row of each factor; so are both gradients.

    torchao's own, `Int8MixedPrecisionTrainingLinear`, breaks the graphs of ``torch.compile``.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return int8_product(rows, weight).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight = ctx.needs_input_grad  # a frozen weight has none
        of_rows = int8_product(gradient, weight.t()).to(rows.dtype) if for_rows else None
        return of_rows, int8_product(gradient.t(), rows.t()).to(weight.dtype) if for_weight else None


def int8_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T`` in fp32, (m, k) x (n, k) -> (m, n), each row rounded to 127 steps of its largest."""
    (a, a_scale), (b, b_scale) = _int8_rows(left), _int8_rows(right)
    return torch._int_mm(a, b.t()) * a_scale * b_scale.t()


def _int8_rows(factor: Tensor) -> tuple[Tensor, Tensor]:
    scale = factor.abs().amax(1, keepdim=True).float().clamp_min(1e-30) / 127
    return (factor / scale).round().to(torch.int8).contiguous(), scale


def product(kind: str, device: torch.device) -> Product:
    """Return the product of a kind on a device.

    Args:
        kind: ``float8_`` and a recipe of torchao: ``tensorwise``, ``rowwise``, ``rowwise_with_gw_hp``; or ``int8``.
        device: on a CPU float8 is emulated: factors are rounded to 8 bits, and multiplied in their own type.
    """
    if kind == "int8":
        return Product(Int8Product, (), transposed=False)
    from torchao.float8 import float8_linear
    from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
    from torchao.float8.config import Float8LinearConfig

    emulate = device.type == "cpu"
    if not emulate:
        _patch_inductor_min_max_codegen()  # as torchao's own conversion does: Triton miscompiles without
    config = replace(Float8LinearConfig.from_recipe_name(kind.removeprefix("float8_")), emulate=emulate)
    layer = float8_linear.Float8Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", config=config)
    return Product(float8_linear.matmul_with_hp_or_float8_args, (layer.linear_mm_config, config), transposed=True)


def linear_layers(blocks: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return name -> layer of the linear layers in blocks, and name -> reason of those that can't multiply in 8 bits.

    Subclasses with a forward of their own are in neither.
    """
    layers: dict[str, nn.Linear] = {}
    reasons: dict[str, str] = {}
    for block_name, block in blocks.items():
        for below, layer in block.named_modules():
            name = f"{block_name}.{below}" if below else block_name
            if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
                continue
            if any(size % MULTIPLE or size < LEAST for size in (layer.in_features, layer.out_features)):
                reasons[name] = f"{layer.in_features} x {layer.out_features}"
            elif "forward" not in vars(layer):
                layers[name] = layer
    return layers, reasons


def multiply_in_low_precision(layers: Iterable[nn.Linear], product: Product) -> None:
    """Have layers multiply by a product in training mode; ``restore_layers`` undoes it.

    Only the instance attribute ``forward`` is set: types, parameters, state-dict keys and hooks stay as they are, and
    so does every forward in eval mode.
    """
    for layer in layers:
        layer.__dict__[_PRODUCT] = product
        layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


def restore_layers(layers: Iterable[nn.Linear]) -> None:
    """Have layers multiply as they did before; a second call does nothing."""
    for layer in layers:
        if layer.__dict__.pop(_PRODUCT, None) is not None:
            del layer.forward


def forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """Run a linear layer: (..., in) -> (..., out), under autocast in its type.

    A function of the module, bound to the layer, so that ``deepcopy`` binds it to the copy; called ``forward``, since
    ``pickle`` stores a bound method by its name, and an unpickled layer then has its class's forward.
    """
    multiply: Product | None = layer.__dict__.get(_PRODUCT)
    if multiply is None or not layer.training or not input.numel():
        return nn.Linear.forward(layer, input)
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    rows = input.reshape(-1, layer.in_features)
    with torch.autocast(device, enabled=False):
        missing = max(-len(rows) % MULTIPLE, LEAST - len(rows))
        # rows of zeros change neither a scale nor a gradient
        padded = nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        output = multiply(padded, layer.weight)[: len(rows)]
        if layer.bias is not None:
            output = output + layer.bias.to(output.dtype)
    return output.reshape(*input.shape[:-1], layer.out_features)
