"""Replace weights by two factors of lower rank, and factors by their product again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedParameter

from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, listed, with_reasons
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.factorized_layers import KINDS, Factorized, built, put, tie
from lightning_solo.nn.named_weights import kept_parameters, matching, parameter_bytes, weights_of
from lightning_solo.nn.quantizable import unsuitable

RECORD = "factors"
"""Key of a checkpoint with name -> form of each factorized layer, and the names that share a factor."""
_BEFORE = "_solo_before"
"""Attribute of a factorized layer with the layer in whose place it is."""
HOOKS = ("_forward_", "_backward_", "_is_full_backward_hook")
"""Beginnings of the attributes of a module that hold its hooks."""
Owners = dict[str, nn.Module]
"""Qualified name of a parameter -> the module that has it, for all its names."""


@dataclass
class Change:
    """What was factorized.

    Attributes:
        layers: qualified name -> factorized layer.
        left_out: qualified name of a matrix that is left as it is -> the reason.
        before, after: bytes of the module's parameters.
    """

    layers: dict[str, Factorized] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    before: int = 0
    after: int = 0


# --- factors of a weight ---


def factors_of(
    weight: Tensor, rank: int | float, start: str = "svd", device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return factors (rows, rank) and (rank, columns) of a weight, in its type.

    Args:
        weight: (rows, columns).
        rank: a number of columns, or the share of the energy, the sum of squared singular values, that is kept.
        start: "svd": the product is the nearest matrix of this rank (Eckart and Young 1936); "random": normal numbers,
            whose product has the weight's mean square.
        device: on which the decomposition is computed; by default the weight's.

    >>> weight = torch.randn(6, 4)
    >>> first, second = factors_of(weight, 4)
    >>> torch.allclose(first @ second, weight, atol=1e-5)
    True
    """
    rows, columns = weight.shape
    if weight.is_meta or isinstance(weight, FakeTensor):
        return weight.new_empty(rows, int(rank)), weight.new_empty(int(rank), columns)
    exact = weight.detach().to(device or weight.device, torch.promote_types(weight.dtype, torch.float32))
    if start == "random":
        # the mean square of the product is rank * std ** 4
        std = (float(exact.square().mean()) or 1 / columns) ** 0.25 / rank**0.25
        left, right = torch.randn(rows, int(rank)).mul_(std), torch.randn(int(rank), columns).mul_(std)
    else:
        left, values, right = torch.linalg.svd(exact, full_matrices=False)
        count = rank if isinstance(rank, int) else _rank_of_share(values, rank)
        root = values[:count].sqrt()
        left, right = left[:, :count] * root, root[:, None] * right[:count]
    if (nonzero := exact.any(1, keepdim=True)).any():  # rows of zeros, as that of padding, stay so to the bit
        left = left.masked_fill(~nonzero.to(left.device), 0)
    first, second = (each.to(weight.device, weight.dtype).contiguous() for each in (left, right))
    return first, second


def _rank_of_share(values: Tensor, share: float) -> int:
    """Return the smallest rank whose singular values have a share of the energy."""
    energy = values.double().square().cumsum(0)
    return int((energy < share * energy[-1]).sum()) + 1


def largest_rank(rows: int, columns: int) -> int:
    """Return the largest rank whose factors have fewer numbers than the weight.

    >>> largest_rank(64, 256)  # 52 * (64 + 256) > 64 * 256
    51
    """
    return (rows * columns - 1) // (rows + columns)


# --- layers of a module ---


def factorize_linear(
    module: nn.Module,
    rank: int | float,
    patterns: Sequence[str] | None = None,
    start: str = "svd",
    device: torch.device | None = None,
    option: str = "",
) -> Change:
    """Replace linear layers, and transformers' ``Conv1D``, by factors.

    Left as they are, and listed, are output heads and frozen layers that no pattern names, what shares a weight with an
    embedding, and layers that factors would make larger. Linear layers that share a weight share its factors. The
    layers keep their weights until `forget_weights`.

    Args:
        module: with loaded weights.
        rank: see `factors_of`.
        patterns: of names of parts or layers; None for all.
        start: see `factors_of`.
        device: see `factors_of`.
        option: path of the settings, for messages; empty for arguments of a function.

    Raises:
        NothingToDoError: there is no such layer, or a pattern matches none.
        ConflictError: a pattern matches only what can't be factorized; or a weight isn't finite.
    """
    at = f"{option}." if option else ""
    change, every = Change(before=parameter_bytes(module)), _matrices(module)
    names = [name for owners in every.values() for name in owners]
    hits = {pattern: matching(names, [pattern], f"{at}layers") for pattern in patterns or ()}
    asked, kept = set[str]().union(*hits.values()), kept_parameters(module)
    inside = {id(plain(part)) for part in module.modules() if plain(part) is not part}
    some_trained = any(p.requires_grad for p in module.parameters())
    factors: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # put in once nothing can be refused any more
    limit, spared = 0, ""  # a rank that makes a layer smaller, and a layer that a pattern would choose
    for p, owners in every.items():
        name = next(iter(owners))
        reason = next(filter(None, (_unfit(p, each, part, inside) for each, part in owners.items())), None)
        if reason is not None and len(owners) > 1:
            reason = f"shared by {' and '.join(owners)}: {reason}"
        if reason is None and len({_is_transposed(part) for part in owners.values()}) > 1:
            reason = "shared by layers of two kinds"
        if reason is None and patterns is not None and not asked & set(owners):
            reason = "no pattern matches it"
        if reason is None and patterns is None:
            reason = kept.get(id(p)) or ("frozen" if some_trained and not p.requires_grad else None)
            if reason and not spared and largest_rank(*p.shape) >= max(1, int(rank)):
                spared = name.rpartition(".")[0]
        if reason is None:
            most = largest_rank(*p.shape)
            if not isinstance(rank, int) or rank <= most:
                factors[p] = factors_of(_finite(p, name, at, owners), rank, start, device)
            needed = factors[p][0].shape[1] if p in factors else int(rank)
            if needed > most:
                reason, limit = f"no smaller at rank {needed}, from rank {most} down it is", max(limit, most)
        if reason is not None:
            factors.pop(p, None)
            change.left_out[name] = reason
    reasons = with_reasons(change.left_out, 8)
    for pattern, matches in hits.items():
        if not any(matches & set(every[p]) for p in factors):
            left = [next(iter(owners)) for owners in every.values() if matches & set(owners)]
            reasons = with_reasons({name: change.left_out[name] for name in left}, 8)
            raise ConflictError(
                f"{at}layers={pattern!r} matches no layer that can be factorized: {reasons}; write patterns of linear"
                f" layers{f', or {at}rank={limit}' if limit else ''}{_or_drop(option)}"
            )
    if not factors:
        remedies = [f"{at}rank={limit}"] * bool(limit) + [f"{at}layers=[{spared}]"] * bool(spared)
        raise NothingToDoError(
            f"{at}rank={rank} makes no layer of {type(module).__name__} smaller: {reasons or 'it has no linear layer'};"
            f" write {', or '.join([*remedies, *[f'~{option}'] * bool(option)]) or 'a module with linear layers'}"
        )
    for p in list(factors):
        _replace(module, change, every[p], "linear", p, factors.pop(p))
    change.after = parameter_bytes(module)
    return change


def factorize_embedding(
    module: nn.Module,
    rank: int | float,
    name: str | None = None,
    start: str = "svd",
    device: torch.device | None = None,
    option: str = "",
) -> Change:
    """Replace an embedding (rows, width) by a table (rows, rank) and a linear layer to its width.

    Heads and embeddings that share its weight share the factors.

    Args:
        module: with loaded weights.
        rank: see `factors_of`.
        name: of the embedding, or its end; None for the largest one.
        start: see `factors_of`.
        device: see `factors_of`.
        option: path of the settings, for messages.

    Raises:
        NothingToDoError: there is no such embedding.
        PresetError: there are several, or the factors have no fewer numbers.
        ConflictError: it can't be factorized.
    """
    at = f"{option}." if option else ""
    change = Change(before=parameter_bytes(module))
    every = _matrices(module)
    tables = {p: o for p, o in every.items() if any(isinstance(part, nn.Embedding) for part in o.values())}
    if not tables:
        remedy = f"; write ~{option}" if option else ""
        raise NothingToDoError(f"{type(module).__name__} has no torch.nn.Embedding to factorize{remedy}")
    if name is not None:
        hits = matching([each for owners in tables.values() for each in owners], [name], f"{at}embedding")
        tables = {p: owners for p, owners in tables.items() if hits & set(owners)}
    most = max(p.numel() for p in tables)
    largest = {p: next(iter(owners)) for p, owners in tables.items() if p.numel() == most}
    if len(largest) > 1:
        some = next(iter(largest.values())).rpartition(".")[0]
        raise PresetError(f"there are several embeddings of {most:,} numbers ({listed([*largest.values()])}); write"
                          f" {at}embedding={some}")  # fmt: skip
    p, first_name = next(iter(largest.items()))
    owners = every[p]
    for each, part in owners.items():
        if reason := _unfit_for_table(each, part):
            raise ConflictError(
                f"{option or 'embedding'} and {each}, which {reason}; write {at}embedding=<another>{_or_drop(option)}"
            )
    rows, width = p.shape
    limit = min(largest_rank(rows, width), width - 1)
    if isinstance(rank, float) or rank <= limit:
        first, second = factors_of(_finite(p, first_name, at, owners), rank, start, device)
    if (isinstance(rank, int) and rank > limit) or first.shape[1] > limit:
        found = "" if isinstance(rank, int) else f", which takes a rank of {first.shape[1]}"
        raise PresetError(
            f"{at}rank={rank}{found}: rank x ({rows} + {width}) numbers are no fewer than {rows} x {width} of"
            f" {first_name}; write {at}rank={limit} or less"
        )
    _replace(module, change, owners, "embedding", p, (first, second.t().contiguous()))
    change.after = parameter_bytes(module)
    return change


def factorized(module: nn.Module, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, Factorized]:
    """Return qualified name -> factorized layer of some kinds, under all names."""
    every = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in every if isinstance(part, Factorized) and part.kind in kinds}


def merge_factors(module: nn.Module, kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
    """Put back the layers that were factorized, with the products of the factors as weights; return their names.

    What was shared is shared again.

    Args:
        module: that a fit with factors has trained.
        kinds: of the layers that are merged; by default all.
    """
    layers, products = factorized(module, kinds), dict[int, nn.Parameter]()
    for layer in dict.fromkeys(layers.values()):
        before: Any = vars(layer)[_BEFORE]
        first = layer.factors()[0]
        if id(first) not in products:
            with torch.no_grad():
                product = layer.weight.t() if _is_transposed(before) else layer.weight
                products[id(first)] = nn.Parameter(product.contiguous(), requires_grad=first.requires_grad)
        before.weight = products[id(first)]
        _put_back(module, layer)
    return list(layers)


def take_back(module: nn.Module, layers: Iterable[Factorized]) -> None:
    """Put back the layers that were factorized, with the weights that they had; not after `forget_weights`."""
    for layer in dict.fromkeys(layers):
        _put_back(module, layer)


def forget_weights(layers: Iterable[Factorized]) -> None:
    """Drop the weights that factorized layers had, which `take_back` needs."""
    for layer in layers:
        vars(layer)[_BEFORE].weight = None


def _put_back(module: nn.Module, layer: Factorized) -> None:
    before: Any = vars(layer)[_BEFORE]
    if layer.bias is not None:
        before.bias = layer.bias
    before.train(layer.training)
    put(module, layer, before)


def _matrices(module: nn.Module) -> dict[nn.Parameter, Owners]:
    """Return each parameter of two or more dimensions outside factorized layers, with its owners."""
    factors = {p for layer in factorized(module).values() for p in layer.parameters()}
    every = weights_of(plain_modules(module, remove_duplicate=False))
    return {
        each.parameter: each.users
        for each in every
        if each.parameter not in factors
        and (isinstance(each.parameter, UninitializedParameter) or each.parameter.ndim > 1)
    }


def _unfit(p: nn.Parameter, name: str, part: nn.Module, inside: set[int]) -> str | None:
    """Return why a layer can't be factorized, or None."""
    if isinstance(p, UninitializedParameter):
        return "without a shape before its first batch"
    if id(part) in inside:
        return "inside an adapter"
    if isinstance(part, nn.Embedding):
        return "an embedding"
    if reason := unsuitable(part, name.rpartition(".")[2], p):
        return reason
    if "." not in name:
        return "the module itself, whose place is outside of it"
    if part._buffers or part._modules or part._parameters.keys() - {"weight", "bias"}:
        return f"of {type(part).__name__}, with more tensors than weight and bias"
    return f"of {type(part).__name__}, with {p.ndim} dimensions" if p.ndim > 2 else None


def _unfit_for_table(name: str, part: nn.Module) -> str | None:
    """Return why a module can't take the factors of its table, or None."""
    if "forward" in vars(part):
        return "is changed by something else"
    if "." not in name:
        return "is the module itself, whose place is outside of it"
    if isinstance(part, nn.Embedding):
        if part.sparse:
            return "has sparse gradients, which its second factor doesn't have (write sparse=False)"
        if part.max_norm is not None or part.scale_grad_by_freq:
            return "has max_norm or scale_grad_by_freq, which act on whole rows"
        return None if type(part).forward is nn.Embedding.forward else f"is a {type(part).__name__} of its own forward"
    if isinstance(part, nn.Linear) and name.endswith("weight") and type(part).forward is nn.Linear.forward:
        return None
    return f"shares the table, and is a {type(part).__name__}"


def _finite(p: nn.Parameter, name: str, at: str, owners: Owners) -> Tensor:
    """Return a weight (rows, columns)."""
    if not (p.is_meta or isinstance(p, FakeTensor)) and not p.isfinite().all():
        raise ConflictError(
            f"{at}rank: {name} isn't finite, and has no singular values; load sound weights, or leave it out of"
            f" {at}layers"
        )
    return p.t() if _is_transposed(next(iter(owners.values()))) else p


def _is_transposed(part: nn.Module) -> bool:
    return type(part).__name__ == "Conv1D"  # of transformers


def _or_drop(option: str) -> str:
    return f", or ~{option}" if option else ""


def _replace(
    module: nn.Module, change: Change, owners: Owners, kind: str, p: nn.Parameter, factors: Sequence[Tensor]
) -> None:
    """Put layers with shared factors in the place of the owners of a weight."""
    first, second = (nn.Parameter(each, requires_grad=p.requires_grad) for each in factors)
    made: dict[int, Factorized] = {}
    for name, part in owners.items():
        if id(part) not in made:
            form = _form(part, "head" if kind == "embedding" and isinstance(part, nn.Linear) else kind, first.shape[1])
            made[id(part)] = _put_form(module, part, form)
            _set_factors(made[id(part)], first, second)
        change.layers[name.rpartition(".")[0]] = made[id(part)]


def _form(part: Any, kind: str, rank: int) -> dict[str, Any]:
    rows, columns = part.weight.t().shape if _is_transposed(part) else part.weight.shape
    if kind == "linear":
        return {"kind": kind, "inputs": columns, "outputs": rows, "rank": rank, "bias": part.bias is not None}
    sizes = {"kind": kind, "rows": rows, "width": columns, "rank": rank}
    return sizes | ({"bias": part.bias is not None} if kind == "head" else {"padding_idx": part.padding_idx})


def _put_form(module: nn.Module, part: Any, form: Mapping[str, Any]) -> Factorized:
    """Put a factorized layer in the place of another, with its bias and hooks."""
    layer = built(form, device="meta", dtype=part.weight.dtype)
    vars(layer)[_BEFORE] = part
    vars(layer).update({name: hooks for name, hooks in vars(part).items() if name.startswith(HOOKS)})
    if layer.bias is not None:
        layer[1].bias = part.bias
        part.bias = None
    layer.train(part.training)
    put(module, part, layer)
    return layer


def _set_factors(layer: Factorized, first: nn.Parameter, second: nn.Parameter) -> None:
    layer[layer.rows_at].weight, layer[1 - layer.rows_at].weight = first, second


# --- checkpoints ---


def record_of(layers: Mapping[str, Factorized]) -> dict[str, Any]:
    """Return the forms of layers, as plain data."""
    forms = {
        name: {"form": layer.options(), "transposed": _is_transposed(vars(layer)[_BEFORE])}
        for name, layer in layers.items()
    }
    first: dict[int, str] = {}
    names = {
        f"{name}.{own}": first.setdefault(id(p), f"{name}.{own}")
        for name, layer in layers.items()
        for own, p in layer.named_parameters()
    }
    return {"layers": forms, "tied": {name: one for name, one in names.items() if one != name}}


def restructure(module: nn.Module, record: Mapping[str, Any]) -> dict[str, Factorized]:
    """Put layers of the forms of a record into a module with dense ones; their weights are without meaning.

    Raises:
        AttributeError: the module has no layer of this name.
    """
    for name, each in record["layers"].items():
        part: Any = module.get_submodule(name)
        if isinstance(part, Factorized):  # a second name
            continue
        weight = part.weight
        layer = _put_form(module, part, each["form"])
        where = {"device": weight.device, "dtype": weight.dtype}
        factors = (nn.Parameter(torch.empty(f.shape, **where), weight.requires_grad) for f in layer.factors())
        _set_factors(layer, *factors)
        forget_weights([layer])
    tie(module, record["tied"])
    every = factorized(module)
    return {name: every[name] for name in record["layers"]}


def with_products(weights: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with products in the place of factors, under the names that layers had without them.

    What was shared is one tensor.
    """
    result = dict(weights)
    products: dict[Any, Tensor] = {}
    for name, each in record["layers"].items():
        kind = each["form"]["kind"]
        rows_at = KINDS[kind].rows_at
        of_rows, other = f"{name}.{rows_at}.weight", f"{name}.{1 - rows_at}.weight"
        key = record["tied"].get(of_rows, of_rows)
        first, second = result.pop(of_rows), result.pop(other)
        if key not in products:
            wide = torch.promote_types(first.dtype, torch.float32)
            product = first.to(wide) @ (second if kind == "linear" else second.t()).to(wide)
            products[key] = (product.t() if each["transposed"] else product).to(first.dtype).contiguous()
        result[f"{name}.weight"] = products[key]
        if f"{name}.1.bias" in result:
            result[f"{name}.bias"] = result.pop(f"{name}.1.bias")
    return result
