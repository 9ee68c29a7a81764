"""Linear layers and embeddings with weights of 2 to 8 bits, for inference. This file needs torch and safetensors alone.

`lightning-solo export --format quantized` writes a copy of it beside the weights, as ``load.py``:

    from load import load
    model = load(MyModel(), "folder")

A weight is an integer times the scale of its row, or of its group in the row. The integers are -2 ** (bits - 1) to
2 ** (bits - 1) - 1; at 2 bits -3, -1, 1 and 3.

    bits / 8 + 2 / group_size bytes per weight: at 4 bits and groups of 32 numbers 0.5 + 0.0625 = 0.5625
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Module = TypeVar("Module", bound=nn.Module)
WIDTHS = (4, 2, 1)
"""Bits of the parts into which codes of less than 8 bits are cut, so that parts fill bytes: 3 = 2 + 1."""


def pack(levels: Tensor, bits: int) -> Tensor:
    """Return integers, int8 (rows, width), packed as uint8 (bytes,); those of 8 bits are returned as they are."""
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


def unpack(packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """Return the integers of a weight, int8 of a shape (rows, width)."""
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
    """Return integers (..., width) times the scales of their groups (..., groups); integers in fp32 are overwritten."""
    groups = levels.float().view(*scales.shape, -1)
    return groups.mul_(scales.float()[..., None]).flatten(-2)


def rounded_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers from -127 to 127 in fp32, and their scale per token: (..., width) -> (..., 1)."""
    x = x.float()
    scale = (torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True) / 127).clamp_(min=1e-30)
    return (x / scale).round_(), scale


class _Packed(nn.Module):
    """A weight (rows, width) in buffers: ``codes`` as `pack` returns them, and ``scales`` (rows, groups)."""

    codes: Tensor
    scales: Tensor
    like: Tensor

    def __init__(self, rows: int, width: int, bits: int, group_size: int) -> None:
        super().__init__()
        self.shape, self.bits = (rows, width), bits
        self.register_buffer("codes", pack(torch.zeros(rows, width, dtype=torch.int8), bits))
        # the bits of bf16 numbers as integers, so that no conversion of the module rounds them
        self.register_buffer("scales", torch.zeros(rows, width // (group_size or width), dtype=torch.int16))
        self.register_buffer("like", torch.empty(0), persistent=False)  # conversions of the module change its type

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in the module's type, for modules that read it themselves."""
        return self.in_fp32().to(self.like.dtype)

    def in_fp32(self) -> Tensor:
        """Return the dequantized weight, in fp32."""
        return dequantized(unpack(self.codes, self.bits, self.shape), self.scales.view(torch.bfloat16))

    def extra_repr(self) -> str:
        return f"{self.shape[1]}, {self.shape[0]}, bits={self.bits}, groups={self.scales.shape[1]}"


class PackedLinear(_Packed):
    """A linear layer: (..., in) -> (..., out).

    Args:
        rows: outputs.
        width: inputs.
        bits: of a weight.
        group_size: inputs that share a scale; 0 for a scale per row.
        bias: whether it has one.
        activations: "int8" if each token of the input is rounded to 8 bits, else "unchanged".
    """

    def __init__(
        self, rows: int, width: int, bits: int, group_size: int, bias: bool = True, activations: str = "unchanged"
    ) -> None:
        super().__init__(rows, width, bits, group_size)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False) if bias else None
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.activations != "int8":
            return F.linear(x, self.in_fp32().to(x.dtype), bias)
        numbers, scale = rounded_activations(x)
        if torch.is_grad_enabled() and x.requires_grad:  # straight through, as in training
            x = x + ((numbers * scale).to(x.dtype) - x).detach()
            return F.linear(x, self.in_fp32().to(x.dtype), bias)
        if self.scales.shape[1] > 1 or x.device.type != "cpu" or not _multiplies_integers():
            return F.linear((numbers * scale).to(x.dtype), self.in_fp32().to(x.dtype), bias)
        levels = unpack(self.codes, self.bits, self.shape)
        sums = torch._int_mm(numbers.view(-1, x.shape[-1]).to(torch.int8), levels.t())
        scales = self.scales[:, 0].view(torch.bfloat16).float()
        y = sums.to(torch.float32).mul_(scales).view(*x.shape[:-1], -1)  # one type in each pass, which is vectorized
        y = y.mul_(scale) if bias is None else torch.addcmul(bias.float(), y, scale, out=y)
        return y.to(x.dtype)


class PackedEmbedding(_Packed):
    """An embedding: indices (...) -> (..., width)."""

    def forward(self, indices: Tensor) -> Tensor:
        if self.bits == 8:
            rows = dequantized(self.codes[indices], self.scales[indices].view(torch.bfloat16))
        else:
            rows = self.in_fp32()[indices]
        return rows.to(self.like.dtype)


_exact: list[bool] = []


def _multiplies_integers() -> bool:
    """Return whether torch multiplies int8 exactly here; CPUs without VNNI may cut large sums."""
    if not _exact:
        ones = torch.ones(64, 64, dtype=torch.int8)
        _exact.append(bool((torch._int_mm(ones * 127, ones * -128) == -64 * 127 * 128).all()))
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
            elif any(getattr(child, "activations", "int8") == "int8" for child in changed):
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
    made: dict[str, nn.Module] = {}
    for name, options in config["layers"].items():
        if isinstance(here := module.get_submodule(name), _Packed):  # inside a part that has two names
            made[name] = here
            continue
        options = dict(options)
        kind, shares = options.pop("kind"), options.pop("shares", None)
        made[name] = PackedEmbedding(**options) if kind == "embedding" else PackedLinear(**options)
        if shares is not None:
            made[name].codes, made[name].scales = made[shares].codes, made[shares].scales
        made[name].to(dtype=here.weight.dtype)  # type: ignore[arg-type]
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, made[name])
    weights.update({name: weights[first] for name, first in config["tied"].items()})
    module.load_state_dict(weights)
    for part, key, value in kernels_past(module, [*made.values()]):
        setattr(part, key, value)
    return module.eval()
