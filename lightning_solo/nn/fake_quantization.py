"""Layers that compute with rounded weights while the weights themselves are trained.

Fake quantization (Jacob et al. 2018, arXiv 1712.05877): forward rounds the weight to integers of 2 to 8 bits times the
scale of a row or group, backward passes the gradient through the rounding unchanged (straight-through estimator, Bengio
et al. 2013, arXiv 1308.3432). The number with the largest magnitude of its group is -2 ** (bits - 1), since there is
one negative integer more: the scale is negative where that number is positive. At 2 bits four evenly spaced numbers
around zero are better than three and a zero (Liu et al. 2025, ParetoQ, arXiv 2502.02631): -3, -1, 1 and 3. fp8 rounds
to torch.float8_e4m3fn instead, whose largest number is 448 (Micikevicius et al. 2022, arXiv 2209.05433).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from lightning_solo.attributes import switched
from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, listed, with_reasons
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.factorized_layers import KINDS
from lightning_solo.nn.factorizing import factorized
from lightning_solo.nn.forwards import record_of, replace_forward, restore_forwards
from lightning_solo.nn.named_weights import Weight, kept_parameters, kind_of, selected, weights_of
from lightning_solo.nn.packed_weights import FP8, dequantized, rounded_activations
from lightning_solo.nn.quantizable import unsuitable
from lightning_solo.nn.quantized import quantized_weights_of

LINEAR = "linear"
"""Selects every linear layer but output heads."""
BITS = (2, 3, 4, 5, 6, 7, 8, FP8)
ACTIVATIONS = ("unchanged", "int8")
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
INSIDE = ("attention", "experts")
"""Kinds of weights that their module reads by itself."""
RECORD = "fake_quantization"
"""The key of a checkpoint that holds how its run rounded weights, and in which layers."""


@dataclass
class Rounding:
    """How weights are rounded; each layer with rounded weights has one as its record."""

    bits: int | str  # of a weight, 2 to 8, or "fp8"
    group_size: int  # inputs that share a scale; 0 for a scale per row
    activations: str = "unchanged"  # "int8" if each token of a layer's input is rounded to 8 bits, else "unchanged"
    active: bool = True  # whether the layers round now

    def as_record(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return {"bits": self.bits, "group_size": self.group_size, "activations": self.activations}


def levels_and_scales(weight: Tensor, bits: int | str, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the numbers (..., width) of a weight (..., width) in fp32, and the scales (..., groups) in bf16.

    bf16 has the range of fp32, so that groups of very small weights aren't rounded to zero.
    """
    width = weight.shape[-1]
    groups = weight.float().reshape(*weight.shape[:-1], -1, group_size or width)
    low, high = groups.aminmax(dim=-1)
    largest = torch.where(high > -low, high, low)
    least = -LARGEST_FP8 if isinstance(bits, str) else -3.0 if bits == 2 else -(2.0 ** (bits - 1))
    scales = (largest.abs() / -least if bits in (2, FP8) else largest / least).to(torch.bfloat16)
    ratios = groups / torch.where(scales == 0, 1, scales.float())[..., None]  # a group of zeros has the scale 0
    if isinstance(bits, str):
        return ratios.clamp_(least, -least).to(torch.float8_e4m3fn).float().flatten(-2), scales
    if bits == 2:
        return ratios.sub_(1).div_(2).round_().clamp_(-2, 1).mul_(2).add_(1).flatten(-2), scales
    return ratios.round_().clamp_(least, -least - 1).flatten(-2), scales


class _StraightThrough(torch.autograd.Function):
    """Rounded numbers with the gradient of the numbers."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int | str, group_size: int) -> Tensor:
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


@dataclass
class Inside:
    """The record of a module that reads its parameters itself, such as attention or experts."""

    names: list[str]  # of its parameters, with those of parts that it doesn't call
    rounding: Rounding  # how they are rounded


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a linear layer, transformers' ``Conv1D``, an embedding or any module with rounded parameters."""
    inside = record_of(layer, Inside)
    rounding = record_of(layer, Rounding) if inside is None else inside.rounding
    if rounding is None or not rounding.active:
        return type(layer).forward(layer, *args, **kwargs)
    if inside is not None:
        return _with_rounded(layer, inside, args, kwargs)
    if isinstance(layer, nn.Embedding):  # of the rows that are read alone
        return rounded(type(layer).forward(layer, *args, **kwargs), rounding)
    return _linear(layer, rounding, *args, **kwargs)


def _linear(layer: nn.Module, rounding: Rounding, input: Tensor) -> Tensor:
    if rounding.activations == "int8":
        input = _StraightThroughTokens.apply(input)  # type: ignore[no-untyped-call]
    weight = cast("Tensor", layer.weight)
    weight = weight if isinstance(layer, nn.Linear) else weight.t()
    return F.linear(input, rounded(weight, rounding), cast("Tensor | None", layer.bias))


def _with_rounded(layer: nn.Module, inside: Inside, args: Any, kwargs: Any) -> Any:
    """Run a module's forward while rounded tensors hide its parameters."""
    hidden = []
    try:
        for name in inside.names:
            path, _, own = name.rpartition(".")
            owner = layer.get_submodule(path)
            vars(owner)[own] = rounded(owner.get_parameter(own), inside.rounding)
            hidden.append((owner, own))
        return type(layer).forward(layer, *args, **kwargs)
    finally:
        for owner, own in hidden:
            del vars(owner)[own]


def unfused_attention() -> AbstractContextManager[None]:
    """Make torch's transformer layers call their parts in evaluation, too, instead of reading these parts' weights."""
    return switched(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)


# --- the choice of layers ---


@dataclass
class Layers:
    """The weights that are rounded.

    Attributes:
        weights: qualified name -> weight; of a tied one that of a layer whose inputs are rounded along.
        layers: qualified name -> linear layer, ``Conv1D``, or an embedding that shares its weight with one of them.
        insides: qualified name of another module -> the module, and names of its parameters.
        left_out: qualified name of a matrix that is left as it is -> the reason.
        left_share: the share of all numbers of the module that are left.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    insides: dict[str, tuple[nn.Module, list[str]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    left_share: float = 0.0

    @property
    def names(self) -> list[str]:
        """Patterns that choose the same weights again; embeddings follow the layers that share their weight."""
        own = [name for name, layer in self.layers.items() if not isinstance(layer, nn.Embedding)]
        return [*own, *(f"{name}.{each}" if name else each for name, (_, all) in self.insides.items() for each in all)]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that compute with rounded weights."""
        return [*self.layers.values(), *(part for part, _ in self.insides.values())]


def round_weights(choice: Layers, rounding: Rounding) -> None:
    """Make modules compute with rounded weights, until `restore`."""
    for layer in choice.layers.values():
        replace_forward(layer, forward, rounding)
    for part, names in choice.insides.values():
        replace_forward(part, forward, Inside(names, rounding))


def restore(choice: Layers) -> None:
    """Make modules compute with their weights as they are."""
    restore_forwards(choice.layers.values(), Rounding)
    restore_forwards([part for part, _ in choice.insides.values()], Inside)


def chosen_layers(
    module: nn.Module,
    rounding: Rounding,
    patterns: str | Sequence[str] = LINEAR,
    option: str = "",
    *,
    with_factors: bool = False,
) -> Layers:
    """Return the weights that can be rounded.

    These are weights of linear layers, of transformers' ``Conv1D`` and of torch's attention, and the experts of
    mixtures in three dimensions, by default without output heads and weights that are shared with an embedding. A layer
    that shares a chosen weight, such as the embedding of a tied head, is chosen too, so that all uses compute with the
    same numbers.

    Args:
        module: with plain weights.
        rounding: bits and size of groups.
        patterns: `LINEAR`, or patterns of qualified names of layers.
        option: path of the settings, for messages; empty for arguments of a function.
        with_factors: whether the two layers in place of a linear one can be chosen, too.

    Raises:
        NothingToDoError: there is no such layer, or a pattern matches none.
        PresetError: the size of a group doesn't divide a layer's inputs.
        ConflictError: a weight has 4 or 8 bits already, isn't finite, is inside an adapter, or is shared with a part
            that can't be rounded.
    """
    at, otherwise = (f"{option}.", f", or write ~{option}") if option else ("", "")
    _refuse_changed(module, at, otherwise, with_factors=with_factors)
    names = None if patterns == LINEAR else [patterns] if isinstance(patterns, str) else list(patterns)
    weights, kept = weights_of(plain_modules(module, remove_duplicate=False)), kept_parameters(module)
    every = [name for weight in weights for name in weight.users]
    hits, direct = selected(every, names or ()), selected(every, names or (), directly=True)
    hosts = {id(part.out_proj): name for name, part in plain_modules(module) if isinstance(part, nn.MultiheadAttention)}
    choice, matched, spared = Layers(), set[str](), list[str]()
    for weight in weights:
        p = weight.parameter
        if p.ndim < 2 or not p.is_floating_point():
            continue
        mine = {pattern for pattern, each in hits.items() if each & weight.users.keys()}
        unfit = {name: _unfit(part, name.rpartition(".")[2], p, hosts) for name, part in weight.layers.items()}
        usual = [name for name in unfit if unfit[name] is None and not isinstance(weight.layers[name], nn.Embedding)]
        reason = "no pattern matches it" if names is not None and not mine else None
        if reason is None and not usual:
            reason = next(filter(None, unfit.values()), "an embedding")
        elif reason is None and all(each.isdisjoint(weight.users) for each in direct.values()):
            reason = kept.get(id(p))
            spared += usual[:1] if reason else []
        if reason is not None:
            choice.left_out |= dict.fromkeys(weight.layers, reason)
            continue
        if odd := [name for name in weight.layers if unfit[name] is not None]:
            raise ConflictError(
                f"{at}layers: {usual[0]} is also {odd[0]}, which can't be rounded ({unfit[odd[0]]}); leave both out of"
                f" {at}layers{otherwise}"
            )
        matched |= mine
        choice.weights[usual[0]] = weight
        for full in sorted(weight.layers, key=lambda name: name not in usual):
            part, (name, _, own) = weight.layers[full], full.rpartition(".")
            if (host := hosts.get(id(part), name)) == name and kind_of(part, own) not in INSIDE:
                choice.layers[name] = part
            else:
                part = part if host == name else dict(plain_modules(module))[host]
                choice.insides.setdefault(host, (part, []))[1].append(full.removeprefix(f"{host}."))
    if missed := [each for each in names or () if each not in matched]:
        there = {name: choice.left_out[name] for name in choice.left_out if name in hits[missed[0]]}
        if there:
            reasons = with_reasons(there)
            raise NothingToDoError(
                f"{at}layers={missed[0]!r} matches {reasons}, which can't be rounded; leave {missed[0]!r} out of"
                f" {at}layers{otherwise}"
            )
        linear = [weight.name.removesuffix(".weight") for weight in weights if weight.kinds & {"linear", "transposed"}]
        raise NothingToDoError(
            f"{at}layers={missed[0]!r} matches no linear layer that can be quantized; there are"
            f" {listed(linear, 8) or 'no linear layers'}"
        )
    if not choice.weights:
        reasons = with_reasons(choice.left_out, 5)
        raise NothingToDoError(
            f"{at}layers={LINEAR}: {type(module).__name__} has no linear layer to quantize; its matrices are"
            f" {reasons or 'none'}; write {at}layers=[{spared[0].removesuffix('.weight')}]{otherwise}"
            if spared
            else f"{type(module).__name__} has no layer that can be quantized; its matrices are {reasons or 'none'}"
            f"{otherwise.replace(', or', ';')}"
        )
    _check(choice.weights, rounding, at, otherwise)
    numbers = sum(weight.parameter.numel() for weight in choice.weights.values())
    choice.left_share = 1 - numbers / sum(p.numel() for p in module.parameters())
    return choice


def _unfit(part: nn.Module, own: str, p: nn.Parameter, hosts: Mapping[int, str]) -> str | None:
    """Return why a module can't compute with a rounded parameter, or None."""
    if id(part) not in hosts and kind_of(part, own) != "attention":
        return unsuitable(part, own, p)
    is_changed = "forward" in vars(part) or hasattr(part, "parametrizations")
    return f"{type(part).__name__} is changed by something else" if is_changed else None


def _refuse_changed(module: nn.Module, at: str, otherwise: str, *, with_factors: bool) -> None:
    """Refuse a module whose weights are in few bits already, or inside adapters."""
    if already := quantized_weights_of(module):
        raise ConflictError(
            f"{at}layers: {listed(list(already))} have 4 or 8 bits already; load plain weights{otherwise}"
        )
    if packed := [name for name, part in module.named_modules() if _is_packed(part)]:
        raise ConflictError(
            f"{at}layers: {listed(packed)} are layers of an export in few bits already; quantize a module with plain"
            f" weights, as it is before load(module, folder){otherwise}"
        )
    if factors := list(factorized(module, ("embedding", "head") if with_factors else tuple(KINDS))):
        raise ConflictError(
            f"{at}layers: {listed(factors)} are factorized, and merging them would change the rounded weights; call"
            f" solo.merge_factors(module) before{otherwise}"
        )
    if adapted := [name for name, part in module.named_modules() if plain(part) is not part]:
        raise ConflictError(
            f"{at}layers: {listed(adapted)} have adapters, and merging them would change the rounded weights; call"
            f" solo.merge_adapters(module) before{otherwise}"
        )


def _is_packed(part: nn.Module) -> bool:
    """Return whether a module is of an export's ``load.py``, whose classes are copies of those in `packed_weights`."""
    return any(cls.__name__ in ("_Packed", "_PackedParameters") for cls in type(part).__mro__)


def _check(weights: Mapping[str, Weight], rounding: Rounding, at: str, otherwise: str) -> None:
    group = rounding.group_size
    widths = {
        name: weight.parameter.shape[0 if "transposed" in weight.kinds else -1] for name, weight in weights.items()
    }
    if group and (odd := [f"{name.removesuffix('.weight')} ({n})" for name, n in widths.items() if n % group]):
        smaller = [size for size in (128, 64, 32, 16, 8) if not any(width % size for width in widths.values())]
        raise PresetError(
            f"{at}group_size={group} doesn't divide the inputs of {listed(odd)}; write"
            f" {' or '.join(f'{at}group_size={size}' for size in (*smaller[:1], 0))}; 0 is a scale per row"
        )
    for name, each in weights.items():
        weight = each.parameter.detach()
        if type(weight) not in (Tensor, FakeTensor):
            raise ConflictError(
                f"{at}layers: the weight {name} is a {type(weight).__name__}, which is converted already; load plain"
                f" weights{otherwise}"
            )
        if not (weight.is_meta or isinstance(weight, FakeTensor)) and not weight.isfinite().all():
            raise ConflictError(
                f"{at}layers: the weight {name} isn't finite, and its codes would mean nothing; load sound weights,"
                f" or leave {name} out of {at}layers"
            )
