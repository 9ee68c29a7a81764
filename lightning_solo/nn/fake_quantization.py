"""Linear layers that compute with rounded weights while the weights themselves are trained.

Fake quantization (Jacob et al. 2018, arXiv 1712.05877): forward rounds the weight to integers of 2 to 8 bits times the
scale of a row or group, backward passes the gradient through the rounding unchanged (straight-through estimator, Bengio
et al. 2013, arXiv 1308.3432). The number with the largest magnitude of its group is -2 ** (bits - 1), since there is
one negative integer more: the scale is negative where that number is positive. At 2 bits four evenly spaced numbers
around zero are better than three and a zero (Liu et al. 2025, ParetoQ, arXiv 2502.02631): -3, -1, 1 and 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, listed
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.factorizing import factorized
from lightning_solo.nn.forwards import record_of, replace_forward
from lightning_solo.nn.named_weights import kept_parameters, selected, weights_of
from lightning_solo.nn.packed_weights import dequantized, rounded_activations
from lightning_solo.nn.quantizable import unsuitable
from lightning_solo.nn.quantized import quantized_weights_of

LINEAR = "linear"
"""Selects every linear layer but output heads."""
BITS = (2, 3, 4, 5, 6, 7, 8)
ACTIVATIONS = ("unchanged", "int8")
RECORD = "fake_quantization"
"""The key of a checkpoint that holds how its run rounded weights, and in which layers."""


@dataclass
class Rounding:
    """How weights are rounded; also the record of layers that do so.

    Attributes:
        bits: of a weight, 2 to 8.
        group_size: inputs that share a scale; 0 for a scale per row.
        activations: "int8" if each token of a layer's input is rounded to 8 bits, else "unchanged".
        active: whether the layers round now.
    """

    bits: int
    group_size: int
    activations: str = "unchanged"
    active: bool = True

    def as_record(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return {"bits": self.bits, "group_size": self.group_size, "activations": self.activations}


def levels_and_scales(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the integers (..., width) of a weight (..., width) in fp32, and the scales (..., groups) in bf16.

    bf16 has the range of fp32, so that groups of very small weights aren't rounded to zero.
    """
    width, least = weight.shape[-1], -(2.0 ** (bits - 1))
    groups = weight.float().reshape(*weight.shape[:-1], -1, group_size or width)
    low, high = groups.aminmax(dim=-1)
    largest = torch.where(high > -low, high, low)
    scales = (largest.abs() / 3 if bits == 2 else largest / least).to(torch.bfloat16)
    ratios = groups / torch.where(scales == 0, 1, scales.float())[..., None]  # a group of zeros has the scale 0
    if bits == 2:
        return ratios.sub_(1).div_(2).round_().clamp_(-2, 1).mul_(2).add_(1).flatten(-2), scales
    return ratios.round_().clamp_(least, -least - 1).flatten(-2), scales


class _StraightThrough(torch.autograd.Function):
    """Rounded numbers with the gradient of the numbers."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int, group_size: int) -> Tensor:
        return dequantized(*levels_and_scales(weight, bits, group_size)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class _StraightThroughTokens(torch.autograd.Function):
    """Tokens rounded to 8 bits, with the gradient of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        numbers, scale = rounded_activations(x)
        return (numbers * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def rounded(weight: Tensor, rounding: Rounding) -> Tensor:
    """Return the rounded weight, in its type, with the gradient of the weight."""
    result: Tensor = _StraightThrough.apply(weight, rounding.bits, rounding.group_size)  # type: ignore[no-untyped-call]
    return result


def forward(layer: nn.Module, input: Tensor) -> Tensor:
    """Run a linear layer, transformers' ``Conv1D`` or an embedding with its rounded weight."""
    rounding = record_of(layer, Rounding)
    if rounding is None or not rounding.active:
        return cast("Tensor", type(layer).forward(layer, input))
    if isinstance(layer, nn.Embedding):  # of the rows that are read alone
        return rounded(type(layer).forward(layer, input), rounding)
    if rounding.activations == "int8":
        input = _StraightThroughTokens.apply(input)  # type: ignore[no-untyped-call]
    weight = cast("Tensor", layer.weight)
    weight = weight if isinstance(layer, nn.Linear) else weight.t()
    return F.linear(input, rounded(weight, rounding), cast("Tensor | None", layer.bias))


def round_weights(layers: Iterable[nn.Module], rounding: Rounding) -> None:
    """Make layers compute with rounded weights; ``restore_forwards(layers, Rounding)`` undoes it."""
    for layer in layers:
        replace_forward(layer, forward, rounding)


# --- the choice of layers ---


@dataclass
class Layers:
    """The layers whose weights are rounded.

    Attributes:
        layers: qualified name -> linear layer, ``Conv1D``, or an embedding that shares its weight with one of them.
        left_out: qualified name of a matrix that is left as it is -> the reason.
        left_share: the share of all numbers of the module that are left.
    """

    layers: dict[str, nn.Module] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    left_share: float = 0.0


def chosen_layers(
    module: nn.Module, rounding: Rounding, patterns: str | Sequence[str] = LINEAR, option: str = ""
) -> Layers:
    """Return the layers whose weights can be rounded.

    These are linear layers and transformers' ``Conv1D``, by default without output heads and weights that are shared
    with an embedding. A layer that shares a chosen weight, such as the embedding of a tied head, is chosen too, so that
    all uses compute with the same numbers.

    Args:
        module: with plain weights.
        rounding: bits and size of groups.
        patterns: `LINEAR`, or patterns of qualified names of layers.
        option: path of the settings, for messages; empty for arguments of a function.

    Raises:
        NothingToDoError: there is no such layer, or a pattern matches none.
        PresetError: the size of a group doesn't divide a layer's inputs.
        ConflictError: a weight has 4 or 8 bits already, isn't finite, is inside an adapter, or is shared with a part
            that can't be rounded.
    """
    at, otherwise = (f"{option}.", f", or write ~{option}") if option else ("", "")
    _refuse_changed(module, at, otherwise)
    names = None if patterns == LINEAR else [patterns] if isinstance(patterns, str) else list(patterns)
    weights, kept = weights_of(plain_modules(module, remove_duplicate=False)), kept_parameters(module)
    every = [name for weight in weights for name in weight.users]
    hits, direct = selected(every, names or ()), selected(every, names or (), directly=True)
    choice, matched = Layers(), set[str]()
    for weight in weights:
        p = weight.parameter
        if p.ndim < 2 or not p.is_floating_point():
            continue
        mine = {pattern for pattern, each in hits.items() if each & weight.users.keys()}
        unfit = {name: _unfit(part, name.rpartition(".")[2], p) for name, part in weight.layers.items()}
        usual = [name for name, part in weight.layers.items() if unfit[name] is None and not _is_table(part)]
        reason = "no pattern matches it" if names is not None and not mine else None
        if reason is None and not usual:
            reason = next(filter(None, unfit.values()), "an embedding")
        elif reason is None and all(each.isdisjoint(weight.users) for each in direct.values()):
            reason = kept.get(id(p))
        if reason is not None:
            choice.left_out |= dict.fromkeys(weight.layers, reason)
            continue
        if odd := [name for name in weight.layers if unfit[name] is not None]:
            raise ConflictError(
                f"{at}layers: {usual[0]} is also {odd[0]}, which can't be rounded ({unfit[odd[0]]}); leave both out of"
                f" {at}layers{otherwise}"
            )
        matched |= mine
        order = sorted(weight.layers, key=lambda name: name not in usual)  # the layer first whose inputs are rounded
        choice.layers |= {name.rpartition(".")[0]: weight.layers[name] for name in order}
    if missed := [each for each in names or () if each not in matched]:
        there = {name: choice.left_out[name] for name in choice.left_out if name in hits[missed[0]]}
        if there:
            reasons = listed([f"{name} ({reason})" for name, reason in there.items()])
            raise NothingToDoError(
                f"{at}layers={missed[0]!r} matches {reasons}, which can't be rounded; leave {missed[0]!r} out of"
                f" {at}layers{otherwise}"
            )
        linear = [weight.name.removesuffix(".weight") for weight in weights if weight.kinds & {"linear", "transposed"}]
        raise NothingToDoError(
            f"{at}layers={missed[0]!r} matches no linear layer that can be quantized"
            f"{f'; write *.{missed[0]}' if any(name.endswith(f'.{missed[0]}') for name in linear) else ''}; there are"
            f" {listed(linear, 8) or 'no linear layers'}"
        )
    if not choice.layers:
        reasons = listed([f"{name} ({reason})" for name, reason in choice.left_out.items()], 5)
        raise NothingToDoError(
            f"{at}layers={LINEAR}: {type(module).__name__} has no linear layer to quantize; its matrices are"
            f" {reasons or 'none'}; write {at}layers=[<pattern of names>]{otherwise}"
        )
    _check(choice.layers, rounding, at, otherwise)
    numbers = {id(layer.weight): cast("Tensor", layer.weight).numel() for layer in choice.layers.values()}
    choice.left_share = 1 - sum(numbers.values()) / sum(p.numel() for p in module.parameters())
    return choice


def _is_table(part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding)


def _unfit(part: nn.Module, own: str, p: nn.Parameter) -> str | None:
    """Return why a module can't compute with a rounded parameter, or None."""
    reason = unsuitable(part, own, p)
    return f"of {type(part).__name__}, with {p.ndim} dimensions" if reason is None and p.ndim > 2 else reason


def _refuse_changed(module: nn.Module, at: str, otherwise: str) -> None:
    """Refuse a module whose weights are in few bits already, or inside adapters."""
    if already := quantized_weights_of(module):
        raise ConflictError(
            f"{at}layers: {listed(list(already))} have 4 or 8 bits already; load plain weights{otherwise}"
        )
    if factors := list(factorized(module)):
        raise ConflictError(
            f"{at}layers: {listed(factors)} are factorized, and merging them would change the rounded weights; call"
            f" solo.merge_factors(module) before{otherwise}"
        )
    if adapted := [name for name, part in module.named_modules() if plain(part) is not part]:
        raise ConflictError(
            f"{at}layers: {listed(adapted)} have adapters, and merging them would change the rounded weights; call"
            f" solo.merge_adapters(module) before{otherwise}"
        )


def _check(layers: Mapping[str, nn.Module], rounding: Rounding, at: str, otherwise: str) -> None:
    group = rounding.group_size
    widths = {name: _width(layer) for name, layer in layers.items()}
    if group and (odd := [f"{name} ({width})" for name, width in widths.items() if width % group]):
        smaller = [size for size in (128, 64, 32, 16, 8) if not any(width % size for width in widths.values())]
        raise PresetError(
            f"{at}group_size={group} doesn't divide the inputs of {listed(odd)}; write"
            f" {' or '.join(f'{at}group_size={size}' for size in (*smaller[:1], 0))}; 0 is a scale per row"
        )
    for name, layer in layers.items():
        weight = cast("Tensor", layer.weight).detach()
        if type(weight) not in (Tensor, FakeTensor):
            raise ConflictError(
                f"{at}layers: the weight of {name} is a {type(weight).__name__}, which is converted already; load plain"
                f" weights{otherwise}"
            )
        if not (weight.is_meta or isinstance(weight, FakeTensor)) and not weight.isfinite().all():
            raise ConflictError(
                f"{at}layers: the weight of {name} isn't finite, and its codes would mean nothing; load sound weights,"
                f" or leave {name} out of {at}layers"
            )


def _width(layer: nn.Module) -> int:
    """Return the inputs of a linear layer, or the numbers of an embedding's row."""
    return cast("Tensor", layer.weight).shape[1 if isinstance(layer, nn.Linear | nn.Embedding) else 0]
