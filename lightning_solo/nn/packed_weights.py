"""Layers with weights of 2 to 8 bits, for inference. It needs torch and safetensors alone.

`lightning-solo export --format quantized` writes a copy of this file beside the weights, as ``load.py``:

    from load import load
    model = load(MyModule(), "folder")

A weight is a number of few bits times the scale of its row, or of its group in the row. Numbers are integers from
-2 ** (bits - 1) to 2 ** (bits - 1) - 1; at 2 bits -3, -1, 1 and 3; with "fp8" those of torch.float8_e4m3fn.

    bits / 8 + 2 / group_size bytes per weight: at 4 bits and groups of 32 numbers 0.5 + 0.0625 = 0.5625
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_solo.nn.factorized_layers import put_factors
from lightning_solo.nn.pruned_layers import shrink

Module = TypeVar("Module", bound=nn.Module)
WIDTHS = (4, 2, 1)
"""Bits of the parts into which codes of less than 8 bits are cut, so that parts fill bytes: 3 = 2 + 1."""
FP8 = "fp8"
"""Instead of a number of bits: numbers of torch.float8_e4m3fn, with 3 bits of mantissa."""


def pack(levels: Tensor, bits: int | str) -> Tensor:
    """Return numbers (rows, width) packed as uint8 (bytes,); those of 8 bits as int8 of their shape.

    Floating-point numbers are stored by their bits, so that no conversion of a module changes them.
    """
    if isinstance(bits, str):
        return levels.to(torch.float8_e4m3fn).contiguous().view(torch.int8)
    levels = levels.to(torch.int8)
    if bits == 8:
        return levels.contiguous()
    flat = levels.flatten()
    left, parts = ((flat + 3) // 2 if bits == 2 else flat + 2 ** (bits - 1)).to(torch.uint8), []
    for width in WIDTHS:
        if bits & width:
            numbers = F.pad(left & (2**width - 1), (0, -left.numel() % (8 // width))).view(8 // width, -1)
            shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=left.device)
            parts.append((numbers << shifts[:, None]).sum(0, dtype=torch.uint8))
            left = left >> width
    return torch.cat(parts)


def unpack(packed: Tensor, bits: int | str, shape: tuple[int, int]) -> Tensor:
    """Return the numbers of a weight of a shape (rows, width), in int8 or torch.float8_e4m3fn."""
    if isinstance(bits, str):
        return packed.view(torch.float8_e4m3fn)
    if bits == 8:
        return packed
    count, start, below = shape[0] * shape[1], 0, 0
    codes: Tensor | None = None
    for width in WIDTHS:
        if bits & width:
            size = -(-count * width // 8)
            part = packed[start : start + size]
            numbers = torch.cat([(part >> shift) & (2**width - 1) for shift in range(0, 8, width)])[:count]
            codes = numbers if codes is None else codes | (numbers << below)
            start, below = start + size, below + width
    assert codes is not None
    levels = codes.view(torch.int8)
    return (levels * 2 - 3 if bits == 2 else levels - 2 ** (bits - 1)).view(shape)


def dequantized(levels: Tensor, scales: Tensor) -> Tensor:
    """Return numbers (..., width) times the scales of their groups (..., groups); those in fp32 are overwritten."""
    groups = levels.float().view(*scales.shape, -1)
    return groups.mul_(scales.float()[..., None]).flatten(-2)


def rounded_activations(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return whole numbers from -128 to 127 in fp32, and their scale: without one of all a scale per token.

    Shapes: (..., width) -> (..., width), and (..., 1) or that of the scale.
    """
    x = x.float()
    if scale is not None:
        return (x / scale).round_().clamp_(-128, 127), scale
    scale = x.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)  # vector_norm is far slower
    return (x / scale).round_(), scale


class _Packed(nn.Module):
    """A weight (..., width) in buffers: ``codes`` as `pack` returns them, and ``scales`` (rows, groups)."""

    codes: Tensor
    scales: Tensor
    like: Tensor

    def __init__(self, shape: Sequence[int], bits: int | str, group_size: int) -> None:
        super().__init__()
        self.full_shape, self.bits = tuple(shape), bits
        self.shape = (math.prod(shape[:-1]), shape[-1])
        self.register_buffer("codes", pack(torch.zeros(self.shape), bits))
        # the bits of bf16 numbers as integers, so that no conversion of the module rounds them
        self.register_buffer("scales", torch.zeros(self.shape[0], shape[-1] // (group_size or shape[-1])).short())
        self.register_buffer("like", torch.empty(0), persistent=False)  # conversions of the module change its type

    def in_fp32(self) -> Tensor:
        """Return the dequantized weight, in fp32."""
        weight = dequantized(unpack(self.codes, self.bits, self.shape), self.scales.view(torch.bfloat16))
        return weight.view(self.full_shape)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in the type of the module, as modules read it that don't call their layers."""
        return self.in_fp32().to(self.like.dtype)

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, reversed(self.full_shape)))}, bits={self.bits}, groups={self.scales.shape[1]}"


class PackedLinear(_Packed):
    """A linear layer: (..., in) -> (..., out).

    Args:
        rows: outputs.
        width: inputs.
        bits: of a weight, or "fp8".
        group_size: inputs that share a scale; 0 for a scale per row.
        bias: whether it has one.
        activations: "int8" if each token of the input is rounded to 8 bits, "int8_static" if the input is by the scale
            in ``input_scale``, else "unchanged".
    """

    input_scale: Tensor | None

    def __init__(
        self, rows: int, width: int, bits: int | str, group_size: int, bias: bool = True, activations: str = "unchanged"
    ) -> None:
        super().__init__((rows, width), bits, group_size)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False) if bias else None
        self.activations = activations
        # the bits of an fp32 number
        self.register_buffer("input_scale", torch.zeros(1, dtype=torch.int32) if "static" in activations else None)
        self._prepared: tuple[Any, float | None, Tensor | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.activations == "unchanged":
            return F.linear(x, self.in_fp32().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        needs_gradient = torch.is_grad_enabled() and x.requires_grad
        is_plain = x.device.type == "cpu" and not needs_gradient and not torch.compiler.is_compiling()
        prepared = self._integers() if is_plain else None
        if prepared is None:
            fixed = None if self.input_scale is None else self.input_scale.view(torch.float32)
            numbers, scale = rounded_activations(x.detach(), fixed)
            x_rounded = (numbers * scale).to(x.dtype)
            if needs_gradient:  # straight through, as in training
                x_rounded = x + (x_rounded - x).detach()
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x_rounded, self.in_fp32().to(x.dtype), bias)
        weight, fixed_scale, bias = prepared
        rows, y = x.reshape(-1, self.shape[1]).float(), x
        if fixed_scale is not None:
            y = _PRODUCT(rows, fixed_scale, 128, weight)
        else:
            numbers, scale = rounded_activations(rows)
            y = _PRODUCT(numbers, 1.0, 128, weight)
            y = y.mul_(scale) if bias is None else torch.addcmul(bias, y, scale, out=y)
        return y.view(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def _integers(self) -> tuple[Any, float | None, Tensor | None] | None:
        """Return a copy of the weight for torch's kernel, the fixed scale of inputs, and the bias in fp32.

        The weight has the bias where the scale is fixed. None where torch has no such kernel.
        """
        is_integer = not isinstance(self.bits, str) and self.scales.shape[1] == 1
        if self._prepared is None and is_integer and _multiplies_integers():
            levels = unpack(self.codes, self.bits, self.shape).contiguous()
            fixed = None if self.input_scale is None else float(self.input_scale.view(torch.float32))
            bias = None if self.bias is None else self.bias.detach().float()
            scales = self.scales[:, 0].view(torch.bfloat16).float()
            self._prepared = _for_kernel(levels, scales, None if fixed is None else bias), fixed, bias
        return self._prepared

    def _load_from_state_dict(self, *args: Any) -> None:
        self._prepared = None
        super()._load_from_state_dict(*args)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._prepared = None
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}


class PackedEmbedding(_Packed):
    """An embedding: indices (...) -> (..., width)."""

    def __init__(self, rows: int, width: int, bits: int | str, group_size: int) -> None:
        super().__init__((rows, width), bits, group_size)

    def forward(self, indices: Tensor) -> Tensor:
        if self.codes.ndim == 2:  # 8 bits
            shape = (indices.numel(), self.shape[1])
            rows = unpack(self.codes[indices], self.bits, shape)
            rows = dequantized(rows, self.scales[indices].view(torch.bfloat16))
        else:
            rows = self.in_fp32()[indices]
        return rows.to(self.like.dtype)


class _PackedParameters(nn.Module):
    """A module some of whose parameters are packed: ``packed_weights`` has a `_Packed` for each.

    They are dequantized once while its forward runs, and otherwise whenever they are read.
    """

    packed_weights: nn.ModuleDict

    def __getattr__(self, name: str) -> Any:
        packed = self.__dict__["_modules"].get("packed_weights", {})
        return packed[name].weight if name in packed else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = self.__dict__
        attributes.update({name: each.weight for name, each in self.packed_weights.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self.packed_weights:
                attributes.pop(name, None)


def _with_packed(module: nn.Module, shapes: Mapping[str, Sequence[int]], bits: int | str, group_size: int) -> None:
    """Put packed weights in the place of a module's own parameters, as those of attention or experts."""
    packed = {name: _Packed(shape, bits, group_size) for name, shape in shapes.items()}
    for name, each in packed.items():
        each.to(dtype=module._parameters[name].dtype)  # type: ignore[union-attr]
        del module._parameters[name]
    cls = type(module)
    module.__class__ = type(f"Packed{cls.__name__}", (_PackedParameters, cls), {"__module__": __name__})
    module.add_module("packed_weights", nn.ModuleDict(packed))


# rounds inputs to x / scale + zero point, multiplies in integers, and scales rows: (..., in) -> (..., out) in fp32
_PRODUCT: Any = getattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32", None)
_exact: list[bool] = []


def _for_kernel(levels: Tensor, scales: Tensor, bias: Tensor | None = None) -> Any:
    """Return integers (rows, width) and the scales of their rows as torch's quantized kernels take them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors of this type are deprecated
        quantized = torch._make_per_channel_quantized_tensor(levels, scales, torch.zeros_like(scales).long(), 0)
    return torch.ops.quantized.linear_prepack(quantized, bias)


def _multiplies_integers() -> bool:
    """Return whether torch multiplies integers exactly here; CPUs without VNNI may cut large sums."""
    if not _exact:
        ones = torch.ones(64, 64)
        try:
            weight = _for_kernel((ones * -128).to(torch.int8), ones[0])
            _exact.append(bool((_PRODUCT(ones * 127, 1.0, 128, weight) == -64 * 127 * 128).all()))
        except (RuntimeError, TypeError, AttributeError):  # other kernels, or another version of torch
            _exact.append(False)
    return _exact[0]


def kernels_past(module: nn.Module, layers: Collection[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """Return part, attribute and value that switch off the kernels of torch's encoders which pass layers by.

    In evaluation such a kernel reads the weights of the layers and calls none of them.
    """
    found: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        inner = part.layers if isinstance(part, nn.TransformerEncoder) else [part]
        passed = [each for each in inner if isinstance(each, nn.TransformerEncoderLayer)]
        if changed := [child for each in passed for child in each.children() if child in layers]:
            if part in passed:
                found.append((part, "activation_relu_or_gelu", 0))  # as for others, which have no such kernel
            elif any(getattr(child, "activations", None) != "unchanged" for child in changed):
                found.append((part, "use_nested_tensor", False))  # rounding tokens takes plain tensors
    return found


def load(module: Module, folder: str | Path) -> Module:
    """Put packed layers into a module of the user's class, and load all its weights; return it in eval mode.

    Raises:
        RuntimeError: the folder's weights are of another module.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    shrink(module, config.get("structure") or {})
    put_factors(module, config.get("factors") or {})
    for name, options in config["layers"].items():
        here, options = module.get_submodule(name), dict(options)
        kind = options.pop("kind")
        if isinstance(here, _Packed | _PackedParameters):  # inside a part that has two names
            continue
        if kind == "parameters":
            _with_packed(here, **options)
            continue
        made = PackedEmbedding(**options) if kind == "embedding" else PackedLinear(**options)
        made.to(dtype=here.weight.dtype)  # type: ignore[arg-type]
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, made)
    for name, first in config["shared"].items():  # buffers of weights that layers share
        owner, other = (module.get_submodule(each) for each in (name, first))
        owner.codes, owner.scales = other.codes, other.scales
    weights.update({name: weights[first] for name, first in config["tied"].items()})
    module.load_state_dict(weights)
    for part, key, value in kernels_past(module, [module.get_submodule(name) for name in config["layers"]]):
        setattr(part, key, value)
    return module.eval()
