"""Frozen weights in 4 or 8 bits or on the host, of linear layers, embeddings, and modules such as a mixture's experts.

NF4 with double quantization (Dettmers et al. 2023, QLoRA, arXiv 2305.14314): each number is one of 16 codes times the
largest magnitude of its block of 64; these magnitudes, less their mean, are themselves stored in 8 bits, with an fp32
scale per 256. int8: each number is an integer from -127 to 127 times a scale per row.

    nf4   1/2 + 1/64 + 4 / (64 * 256) = 0.5159 bytes per weight, and 1,028 bytes per layer
    int8  1 + 4 / (numbers per row)
    host  as they are, in host memory: an embedding copies the rows of a batch to the device, a linear layer its parts

A module is changed in place, by its class: hooks, names and every reference to it stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from lightning_solo.bitsandbytes_operators import bitsandbytes, dynamic_codes
from lightning_solo.memory import host_slabs

FORMATS = ("nf4", "int8")
HOST = "host"
TABLES = ("unchanged", "int8", HOST)
"""How embeddings and output heads are stored."""
BLOCK, SCALES_PER_BLOCK = 64, 256
AT_ONCE = 2**18
"""Numbers that are quantized at a time: temporaries take some 25 bytes for each. A multiple of BLOCK."""
STORED = ("codes", "scale_codes", "scales")
"""The buffers of a quantized weight that are saved."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INT8_MAX = 127
_ROWS = 8192
"""Rows of an output head that are dequantized or copied to the device at a time."""


class QuantizedWeight(nn.Module):
    """A weight in 4 or 8 bits or on the host, as buffers.

    Scales are fp32 numbers in buffers of integers, so that no conversion of a module to bf16 rounds them.

    Args:
        shape: of the weight.
        dtype: of the weight when it is dequantized without another one; conversions of the module change it.
        codes: uint8 (numbers / 2,) for nf4, int8 (rows, numbers per row) for int8, the weight itself for host, which
            no conversion of the module moves or rounds.
        scales: int32 with the bits of fp32 numbers; nf4: the mean magnitude, then a scale for each 256 blocks; int8: a
            scale per row; host: none.
        scale_codes: uint8 (blocks,) for nf4, else None.
    """

    codes: Tensor
    scales: Tensor
    scale_codes: Tensor | None
    like: Tensor
    table: Tensor | None

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, codes: Tensor, scales: Tensor, scale_codes: Tensor | None = None
    ) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        table = None if scale_codes is None else _table(codes.device).view(torch.int32)
        self.register_buffer("codes", codes)
        self.register_buffer("scale_codes", scale_codes)
        self.register_buffer("scales", scales)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=codes.device), persistent=False)

    @property
    def format(self) -> str:
        """``"nf4"``, ``"int8"`` or ``"host"``."""
        if self.codes.is_floating_point():
            return HOST
        return "int8" if self.scale_codes is None else "nf4"

    @property
    def rounding(self) -> str | None:
        """The format if its numbers are rounded, else None."""
        return None if self.format == HOST else self.format

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weight when it is dequantized without another one."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return self.like.device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the buffers that `dequantized` takes."""
        return tuple(each for each in (self.codes, self.scales, self.scale_codes, self.table) if each is not None)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight in a type, by default its own."""
        return dequantized(self.shape, dtype or self.dtype, *self.tensors())

    def saved(self) -> Tensor:
        """Return the weight for a file: dequantized, or as it is on the host."""
        return self.codes.to(self.dtype) if self.format == HOST else self.dequantized()

    def parts(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows of a matrix after the others in a type, on the device; of nf4 all at once."""
        if self.format == "nf4":
            yield slice(None), self.dequantized(dtype)
            return
        for start in range(0, self.shape[0], _ROWS):
            rows = slice(start, min(start + _ROWS, self.shape[0]))
            codes, scales = self.codes[rows], self.scales if self.format == HOST else self.scales[rows]
            yield rows, dequantized(codes.shape, dtype, codes, scales)

    def gathered(self, indices: Tensor) -> Tensor:
        """Return rows in the weight's type, on the device of their indices: (...) -> (..., width)."""
        if self.format != HOST:
            return torch.mul(self.codes[indices], self.scales.view(torch.float32)[indices][..., None]).to(self.dtype)
        flat = indices.flatten().to(self.codes.device)
        rows = torch.empty(len(flat), self.shape[1], dtype=self.codes.dtype, pin_memory=indices.is_cuda)
        torch.index_select(self.codes, 0, flat, out=rows)
        return rows.to(indices.device, non_blocking=True).to(self.dtype).view(*indices.shape, -1)

    def pin(self, device: torch.device) -> None:
        """Copy a weight on the host to pinned memory, from where its parts are copied faster."""
        if device.type == "cuda" and not self.codes.is_pinned():
            self.codes = _on_host(self.codes, device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and convert; numbers on the host stay as they are."""
        codes = self._buffers["codes"]
        if codes is None or not codes.is_floating_point():
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers["codes"] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._buffers["codes"] = codes
        return self

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.format}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        other: Any,
        errors: Any,
    ) -> None:
        """Load all buffers or none: codes with the scales of another weight would be wrong numbers."""
        wanted = [name for name in STORED if getattr(self, name) is not None]
        lacking = [prefix + name for name in wanted if prefix + name not in state_dict]
        if lacking and len(lacking) < len(wanted):
            errors.append(f"a quantized weight is loaded whole, and the file lacks its {', '.join(lacking)}")
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, other, errors)


def layout(shape: torch.Size, format: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of each saved buffer of a weight in 4 or 8 bits."""
    if format == "int8":
        return {"codes": (torch.int8, tuple(shape)), "scales": (torch.int32, tuple(shape[:-1]))}
    numbers = shape.numel()
    blocks = -(-numbers // BLOCK)
    return {
        "codes": (torch.uint8, (-(-numbers // 2),)),
        "scale_codes": (torch.uint8, (blocks,)),
        "scales": (torch.int32, (1 - (-blocks // SCALES_PER_BLOCK),)),
    }


@torch.no_grad()
def quantized(weight: Tensor, format: str = "nf4", device: torch.device | None = None) -> QuantizedWeight:
    """Return a weight in ``nf4`` or ``int8``, on a device, by default its own; or on the ``host`` for this device.

    A part after the other is quantized, so that temporaries stay small. The result is that of the whole at once. Of a
    tensor without numbers nothing is computed.
    """
    dtype, shape = weight.dtype, weight.shape
    device = weight.device if device is None else device
    if format == HOST:
        return on_host(_on_host(weight, device), device)
    if weight.is_meta or isinstance(weight, FakeTensor):
        parts = layout(shape, format).items()
        buffers = {name: torch.empty(size, dtype=kind, device=device) for name, (kind, size) in parts}
        return QuantizedWeight(shape, dtype, **buffers)
    if format == "int8":
        codes = torch.empty(shape, dtype=torch.int8, device=device)
        scales = torch.empty(shape[:-1], dtype=torch.float32, device=device)
        rows, flat_codes, flat_scales = weight.reshape(-1, shape[-1]), codes.view(-1, shape[-1]), scales.view(-1)
        step = max(1, AT_ONCE // shape[-1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step].to(device).float()
            largest = part.abs().amax(1)
            flat_scales[start : start + step] = largest / _INT8_MAX
            flat_codes[start : start + step] = (part * (_INT8_MAX / largest.clamp(min=1e-36)[:, None])).round()
        return QuantizedWeight(shape, dtype, codes, scales.view(torch.int32))
    bitsandbytes()
    flat, numbers = weight.reshape(-1), weight.numel()
    codes = torch.empty(-(-numbers // 2), dtype=torch.uint8, device=device)
    largest = torch.empty(-(-numbers // BLOCK), dtype=torch.float32, device=device)
    for start in range(0, numbers, AT_ONCE):
        part = flat[start : start + AT_ONCE].to(device)
        part = part if part.dtype in FLOATS else part.float()
        packed, magnitudes = torch.ops.bitsandbytes.quantize_4bit(part, BLOCK, "nf4", torch.uint8)
        codes[start // 2 :][: len(packed)] = packed[:, 0]
        largest[start // BLOCK :][: len(magnitudes)] = magnitudes
    mean = largest.mean()
    operators = torch.ops.bitsandbytes
    scale_codes, scales = operators.quantize_blockwise(largest - mean, _table(device), SCALES_PER_BLOCK)
    return QuantizedWeight(shape, dtype, codes, torch.cat([mean[None], scales]).view(torch.int32), scale_codes)


def on_host(weight: Tensor, device: torch.device) -> QuantizedWeight:
    """Return a weight that is on the host, for computations on a device, without a copy."""
    return QuantizedWeight(weight.shape, weight.dtype, weight, torch.empty(0, dtype=torch.int32, device=device))


def _on_host(weight: Tensor, device: torch.device) -> Tensor:
    host_slabs.require_host_room("a weight on the host", [(weight.numel(), weight.dtype)], "store it in 8 bits")
    return host_slabs.host_copy([weight.contiguous()], device)[1][0]


def on_device(weight: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a weight on the host, on a device."""
    return weight.to(device, non_blocking=True)


def _table(device: torch.device) -> Tensor:
    return torch.tensor(dynamic_codes(), device=device)


def dequantized(
    shape: torch.Size,
    dtype: torch.dtype,
    codes: Tensor,
    scales: Tensor,
    scale_codes: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Return a weight of a shape in a type from the buffers of a `QuantizedWeight`."""
    if codes.is_floating_point():
        return on_device(codes, scales.device).to(dtype)
    numbers, computed = scales.view(torch.float32), dtype if dtype in FLOATS else torch.float32
    if scale_codes is None or table is None:
        # a GPU's kernel rounds each product to the type of the result, without a product in fp32 in memory
        weight = torch.empty(shape, dtype=computed, device=codes.device)
        return torch.mul(codes, numbers[..., None], out=weight).to(dtype)
    operators: Any = torch.ops.bitsandbytes
    codes_of_scales = table.view(torch.float32)
    largest = operators.dequantize_blockwise(scale_codes, numbers[1:], codes_of_scales, SCALES_PER_BLOCK, torch.float32)
    largest = largest + numbers[0]
    # as one row of an even length: the kernel for an odd one is compiled at its first call
    even = 2 * codes.numel()
    weight = operators.dequantize_4bit(codes[:, None], largest, BLOCK, "nf4", (even,), computed).view(-1)
    return cast("Tensor", weight[: math.prod(shape)].view(shape).to(dtype))


class _Product(torch.autograd.Function):
    """A linear layer's product; backward dequantizes again instead of keeping the dequantized weight.

    The weight of transformers' ``Conv1D`` is transposed: (in, out).

    The buffers are saved tensors: saved-tensor hooks see them, and a change in place before backward is an error.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, shape: torch.Size, is_transposed: bool, *stored: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.shape, ctx.is_transposed = shape, is_transposed
        weight = dequantized(shape, x.dtype, *stored)
        if is_transposed and bias is not None:  # as the layer itself computes it
            return torch.addmm(bias, x.reshape(-1, shape[0]), weight).view(*x.shape[:-1], shape[1])
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_input = of_bias = None
        stored = ctx.saved_tensors  # once: recomputed blocks give each tensor out once
        if ctx.needs_input_grad[1]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        if ctx.needs_input_grad[0]:
            weight = dequantized(ctx.shape, gradient.dtype, *stored)
            of_input = gradient @ (weight.T if ctx.is_transposed else weight)
        return of_input, of_bias, None, None, *[None] * len(stored)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes: autocast's, or that of its input."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


class _Quantized(nn.Module):
    """A module of which some parameters are quantized: `quantized_weights` has a `QuantizedWeight` for each."""

    quantized_weights: nn.ModuleDict

    def __getattr__(self, name: str) -> Any:
        """Return a quantized parameter dequantized, as code reads it that asks for its type or its numbers."""
        weights = vars(self)["_modules"].get("quantized_weights")
        if name != "quantized_weights" and weights is not None and name in weights:
            return weights[name].dequantized()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a quantized weight takes a tensor, and is quantized from it."""
        weights = vars(self).get("_modules", {}).get("quantized_weights")
        if weights is None or name not in weights:
            super().__setattr__(name, value)
            return
        if getattr(value, "requires_grad", False):
            raise ValueError(
                f"{name} is stored in 4 or 8 bits and must be a frozen tensor; dequantize the module first"
            )
        before = weights[name]
        weights[name] = quantized(value.detach(), before.format, before.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load; a weight that isn't quantized in the file is quantized."""
        for name, weight in self.quantized_weights.items():
            stored = cast("QuantizedWeight", weight)
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.shape == stored.shape:
                del state_dict[prefix + name]
                made = quantized(given, stored.format, stored.codes.device).state_dict()
                state_dict.update({f"{prefix}quantized_weights.{name}.{key}": value for key, value in made.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


class QuantizedLinear(_Quantized, nn.Linear):
    """A linear layer with a frozen weight in 4 or 8 bits: (..., in) -> (..., out).

    It computes in autocast's type if that is enabled, else in the type of its input, as if its weight had that type.
    Its bias is an ordinary parameter.
    """

    def forward(self, input: Tensor) -> Tensor:
        return product(input, _weight(self), self.bias)


class QuantizedConv1D(_Quantized):
    """transformers' linear layer with a transposed weight, in 4 or 8 bits; see `QuantizedLinear`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, _weight(self), cast("Tensor | None", self.bias), is_transposed=True)


def _weight(layer: Any) -> QuantizedWeight:
    return cast("QuantizedWeight", layer.quantized_weights["weight"])


def product(input: Tensor, weight: QuantizedWeight, bias: Tensor | None, *, is_transposed: bool = False) -> Tensor:
    """Return the output of a linear layer: (..., in) -> (..., out)."""
    dtype = product_dtype(input)
    bias = None if bias is None else bias.to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        arguments = input.to(dtype), bias, weight.shape, is_transposed, *weight.tensors()
        output: Tensor = _Product.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


class QuantizedEmbedding(_Quantized, nn.Embedding):
    """An embedding with a frozen weight in 8 bits or on the host: indices (...) -> (..., width), in its type."""

    def forward(self, input: Tensor) -> Tensor:
        return _weight(self).gathered(input)


class _QuantizedParameters(_Quantized):
    """A module of another class: its quantized parameters are dequantized while its forward runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point())
        dtype = next(map(product_dtype, inputs), None)
        attributes = vars(self)
        for name, weight in self.quantized_weights.items():
            attributes[name] = cast("QuantizedWeight", weight).dequantized(dtype)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self.quantized_weights:
                attributes.pop(name, None)


_CLASSES: dict[type, type] = {}


def _class_of(cls: type) -> type:
    """Return the class of a quantized module from its own class, the same each time."""
    if cls not in _CLASSES:
        kind: type = QuantizedConv1D if cls.__name__ == "Conv1D" else _QuantizedParameters
        for plain, other in ((nn.Linear, QuantizedLinear), (nn.Embedding, QuantizedEmbedding)):
            if issubclass(cls, plain):
                kind = other
        if cls in (nn.Linear, nn.Embedding):
            _CLASSES[cls] = kind
        else:  # by the names of its own class, so that it is read as one in a summary
            bases = (kind, cls)
            _CLASSES[cls] = type(f"Quantized{cls.__name__}", bases, {"__module__": __name__, "__reduce_ex__": _reduce})
    return _CLASSES[cls]


def _rebuilt(cls: type, state: dict[str, Any]) -> Any:
    made: Any = nn.Module.__new__(_class_of(cls))
    made.__setstate__(state)
    return made


def _reduce(self: Any, protocol: int) -> Any:
    """Pickle a module whose class is made at run time, by its own class."""
    return _rebuilt, (type(self).__bases__[1], dict(vars(self)))


def quantize(module: nn.Module, weights: Mapping[str, QuantizedWeight]) -> Callable[[], None]:
    """Put quantized weights in the place of a module's parameters; return the function that dequantizes them again.

    The parameters' own data is dropped. After the returned function the module has its class and its very parameters
    again, which hold the rounded numbers in the type that the module then has.
    """
    cls, parameters = type(module), dict(module._parameters)
    _check(module, weights)
    for name in weights:
        p = cast("nn.Parameter", module._parameters.pop(name))
        p.data = p.data.new_empty(0)  # other references to it hold no memory
    module.__class__ = _class_of(cls)
    module.add_module("quantized_weights", nn.ModuleDict(weights))
    return lambda: _dequantize(module, cls, parameters)


def _check(module: nn.Module, weights: Mapping[str, QuantizedWeight]) -> None:
    for name, weight in weights.items():
        p = module._parameters.get(name)
        if p is None or p.requires_grad or (p.numel() and p.shape != weight.shape):  # a tied one is empty already
            found = "there is none" if p is None else f"it has shape {tuple(p.shape)}, requires_grad={p.requires_grad}"
            raise ValueError(f"{name} must be a frozen parameter of shape {tuple(weight.shape)}; {found}")


def _dequantize(module: nn.Module, cls: type, parameters: Mapping[str, nn.Parameter | None]) -> None:
    if not isinstance(module, _Quantized):
        return
    weights = weights_in(module)
    del module.quantized_weights
    module.__class__ = cls
    now = dict(module._parameters)
    module._parameters.clear()
    for name, p in parameters.items():  # in their order
        if name in weights:
            p = cast("nn.Parameter", p)
            weight = weights[name]
            if not p.numel() and isinstance(weight.codes, FakeTensor):  # nothing is computed, as in `quantized`
                p.data = weight.codes.new_empty(weight.shape, dtype=weight.dtype)
            elif not p.numel():  # one that is tied was filled before
                p.data = weight.dequantized()
            module._parameters[name] = p
        else:
            module._parameters[name] = now.pop(name, None)
    module._parameters.update({name: p for name, p in now.items() if name not in module._parameters})


def with_plain_weights(states: Mapping[str, Any], weights: Mapping[str, QuantizedWeight]) -> dict[str, Any]:
    """Return a state dict with dequantized weights instead of the buffers of quantized ones.

    Args:
        states: of a module.
        weights: qualified name of a parameter -> its quantized weight, as from `quantized_weights_of`.
    """
    prefixes = {}
    for name in weights:
        part, _, parameter = name.rpartition(".")
        prefixes[f"{part}.quantized_weights.{parameter}" if part else f"quantized_weights.{parameter}"] = name
    plain: dict[str, Any] = {}
    made: dict[int, Tensor] = {}  # tied weights stay tied
    for key, value in states.items():
        whole = prefixes.get(key.rpartition(".")[0])
        if whole is None:
            plain[key] = value
        elif whole not in plain:
            weight = weights[whole]
            plain[whole] = made[id(weight)] if id(weight) in made else made.setdefault(id(weight), weight.saved())
    return plain


def weights_in(part: nn.Module) -> dict[str, QuantizedWeight]:
    """Return name of a module's own parameter -> quantized weight; empty for a plain module."""
    return cast("dict[str, QuantizedWeight]", dict(part.quantized_weights)) if isinstance(part, _Quantized) else {}


def count_parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters, with those in 4 or 8 bits, which torch doesn't list."""
    weights = {part for part in module.modules() if isinstance(part, QuantizedWeight)}
    return sum(p.numel() for p in module.parameters()) + sum(weight.shape.numel() for weight in weights)


def quantized_weights_of(module: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the qualified name of each quantized parameter, under each of its module's names -> its weight."""
    return {
        f"{name}.{key}" if name else key: weight
        for name, part in module.named_modules(remove_duplicate=False)
        for key, weight in weights_in(part).items()
    }
