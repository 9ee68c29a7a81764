"""The layers of a module that get adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_solo.errors import ConflictError, NothingToDoError, listed, nearest, with_reasons
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.blocks import after_blocks, feed_forward_parts
from lightning_solo.nn.named_weights import named
from lightning_solo.nn.quantized import weights_in

OPTION = "callback.adapters"
ALL_LINEAR = "all-linear"
FROZEN = "frozen, beside trained ones"
LINEAR = ("Linear", "Conv1D")
"""Kinds of layers that `ALL_LINEAR` selects; Conv1D is transformers' linear layer with a transposed weight."""
KINDS = {
    "lora": (*LINEAR, "Embedding", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention"),
    "rslora": (*LINEAR, "Embedding", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention"),
    "dora": (*LINEAR, "Embedding", "Conv2d"),
    "pissa": LINEAR,
    "ia3": (*LINEAR, "Conv2d"),
}
"""Method -> kinds of layers that it can adapt."""


@dataclass
class Targets:
    """The layers to adapt.

    Attributes:
        layers: qualified name -> layer, in module order; of several names of a layer the first.
        left_out: qualified name of a linear layer that gets no adapter -> the reason.
    """

    layers: dict[str, nn.Module] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def targets_of(module: nn.Module, targets: str | Sequence[str], method: str) -> Targets:
    """Return the layers that get adapters.

    `ALL_LINEAR` selects the linear layers, and attention modules of torch, except output heads, frozen layers beside
    trained ones (a teacher), weights that another layer shares, and weights that are computed from others. A pattern
    selects layers by their class or their qualified name.

    Args:
        module: possibly with adapters of another name.
        targets: `ALL_LINEAR`, or patterns.
        method: one of `KINDS`.

    Raises:
        NothingToDoError: a pattern, or all of them, match nothing; the message lists the layers.
        ConflictError: a pattern matches a layer that can't have an adapter.
    """
    modules = dict(plain_modules(module))
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if patterns == [ALL_LINEAR]:
        return _all_linear(module, modules, method)
    chosen, weights = _matched(module, modules, patterns, method), owners_of_weights(modules)
    left_out = {name: reason for name in chosen if (reason := _unfit(name, modules, weights)) is not None}
    for name, reason in left_out.items():
        if any(name in named(modules, pattern) for pattern in patterns):  # else by its class, as many others
            raise ConflictError(
                f"{OPTION}.targets matches {name}, {reason}; write patterns that leave it out, as targets={ALL_LINEAR}"
                f" does, or name it in {OPTION}.modules_to_save, which trains the whole layer"
            )
        del chosen[name]
    if not chosen:
        raise NothingToDoError(_all_left_out(targets, module, left_out, method))
    frozen = {name for name, part in chosen.items() if _is_frozen(part)}
    if len(frozen) == len(chosen):
        frozen = set()  # these layers are meant, and were frozen by hand
    order = [name for name in modules if name in chosen and name not in frozen]
    left_out |= {name: FROZEN for name in modules if name in frozen}
    return Targets({name: chosen[name] for name in order}, left_out)


def _matched(
    module: nn.Module, modules: dict[str, nn.Module], patterns: Sequence[str], method: str
) -> dict[str, nn.Module]:
    """Return qualified name -> layer that a pattern matches, without projections of matched attention modules."""
    first = {id(part): name for name, part in modules.items()}
    every = list(plain_modules(module, remove_duplicate=False))
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = named([name for name, _ in every if name], pattern)
        hits = {first[id(part)]: part for name, part in every if name in names or pattern in _classes(part)}
        layers = {name: part for name, part in hits.items() if _kind(part) in KINDS[method]}
        if not layers:
            raise NothingToDoError(_no_match(pattern, modules, hits, method))
        chosen |= layers
    for name, attention in _attention_of(modules).items():
        if name in chosen and attention not in chosen:
            raise ConflictError(
                f"{OPTION}.targets matches {name}, whose weight {attention} reads without calling it: an adapter there"
                f" would never run; write the attention module itself: {OPTION}.targets=[{attention.split('.')[-1]}]"
            )
        chosen.pop(name, None)
    return chosen


def _all_linear(module: nn.Module, modules: dict[str, nn.Module], method: str) -> Targets:
    owner, weights, heads = _attention_of(modules), owners_of_weights(modules), _heads(module, modules)
    is_all_frozen = _is_frozen(module)  # so the base was frozen by hand; else what is frozen may be a teacher
    with_attention = "MultiheadAttention" in KINDS[method]
    found = Targets()
    for name, part in modules.items():
        if _has_experts(part):
            found.left_out[name] = "experts, weights of three dimensions"
        if _kind(part) not in (*LINEAR, "MultiheadAttention") or (name in owner and with_attention):
            continue
        reason = heads.get(id(part)) or _unfit(name, modules, weights)
        if name in owner or (_kind(part) == "MultiheadAttention" and not with_attention):
            reason = f"of an attention module of torch, which method={method} can't adapt"
        elif _is_frozen(part) and not is_all_frozen:
            reason = FROZEN
        if reason is None:
            found.layers[name] = part
        else:
            found.left_out[name] = reason
    if not found.layers:  # then what was frozen by hand is meant
        found.layers = {name: modules[name] for name, reason in found.left_out.items() if reason == FROZEN}
        found.left_out = {name: reason for name, reason in found.left_out.items() if reason != FROZEN}
    if not found.layers:
        raise NothingToDoError(_all_left_out(ALL_LINEAR, module, found.left_out, method))
    return found


def _all_left_out(targets: str | Sequence[str], module: nn.Module, left_out: Mapping[str, str], method: str) -> str:
    reasons = with_reasons(left_out, 8)
    others = [part for name, part in plain_modules(module) if _kind(part) in KINDS[method] and name not in left_out]
    classes = listed(dict.fromkeys(type(part).__name__ for part in others), 8)
    return (
        f"{OPTION}.targets={targets} selects no layer of {type(module).__name__}; it leaves out"
        f" {reasons or 'nothing: there are no linear layers'}; "
        + (f"write {OPTION}.targets=[{classes}]" if classes else f"method={method} can adapt no other layer")
    )


def named_modules_of(module: nn.Module, names: Sequence[str], option: str) -> dict[str, nn.Module]:
    """Return qualified name -> module for patterns of names, as ``lm_head`` of ``net.lm_head``.

    Raises:
        NothingToDoError: a pattern matches nothing.
    """
    modules = dict(plain_modules(module))
    first = {id(part): name for name, part in modules.items()}
    every = {name: part for name, part in plain_modules(module, remove_duplicate=False) if name}
    chosen: dict[str, nn.Module] = {}
    for each in names:
        hits = {first[id(every[name])]: every[name] for name in named(every, each)}
        if not hits:
            raise NothingToDoError(f"{option}: {_no_module(each, module, modules)}")
        chosen |= hits
    return chosen


def _no_module(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    path, _, own = name.rpartition(".")
    owners = [each for each, part in modules.items() if own in part._parameters and f".{each}".endswith(path)]
    if owners:
        where = f"write {owners[0]}, the module that has it, or " if owners[0] else ""
        return f"{name} is a parameter, and modules are trained whole; {where}make it the parameter of its own module"
    others = [each for each, part in modules.items() if each and part._parameters]
    return f"no module {name!r} in {type(module).__name__}{nearest(name, others)}there are {listed(others, 8)}"


def feed_forward_outputs(module: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """Return the names of layers that lead from a feed-forward part's larger width back; IA3 scales their inputs."""
    try:
        parts = list(feed_forward_parts(module).values())
    except NothingToDoError:
        return []
    inside = {id(layer) for part in parts for layer in part.modules()}
    return [name for name, layer in layers.items() if id(layer) in inside and _narrows(layer)]


def _narrows(layer: nn.Module) -> bool:
    """Return whether a linear layer has more inputs than outputs."""
    if isinstance(layer, nn.Linear):
        return layer.in_features > layer.out_features
    inputs, *_, outputs = layer.get_parameter("weight").shape
    return inputs > outputs


def owners_of_weights(modules: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    """Return id of parameter -> names of the modules that have it."""
    owners: dict[int, list[str]] = {}
    for name, part in modules.items():
        for p in part._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(name)
    return owners


def _kind(part: nn.Module) -> str | None:
    """Return the kind of layer as `KINDS` names it."""
    names = [cls.__name__ for cls in type(part).__mro__]
    if names[0] == "Conv1D":
        return "Conv1D"
    if isinstance(part, nn.modules.conv._ConvNd) and getattr(part, "transposed", False):
        return None
    kinds = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention")
    return next((name for name in names if name in kinds and hasattr(nn, name)), None)


def _classes(part: nn.Module) -> set[str]:
    """Return the names of classes by which a pattern selects a module."""
    # torch's attention reads the weight of a subclass of Linear, which nobody means by "Linear"
    unusual = isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return set() if unusual else {cls.__name__ for cls in type(part).__mro__ if cls not in (nn.Module, object)}


def _no_match(pattern: str, modules: dict[str, nn.Module], hits: dict[str, nn.Module], method: str) -> str:
    if hits:
        kinds = dict.fromkeys(type(part).__name__ for part in hits.values())
        inside = any(_kind(part) in KINDS[method] for hit in hits.values() for _, part in plain_modules(hit))
        remedy = f"write the layers inside, as ['{pattern}.*']" if inside else "write others"
        return (
            f"{OPTION}.targets={pattern!r} matches only {', '.join(kinds)} ({listed(hits)}), which method={method}"
            f" can't adapt; it adapts {', '.join(KINDS[method])}; {remedy}, or name it in {OPTION}.modules_to_save,"
            " which trains it whole"
        )
    ends = dict.fromkeys(_end(name) for name, part in modules.items() if _kind(part) in KINDS[method])
    classes = dict.fromkeys(type(part).__name__ for part in modules.values() if _kind(part) in KINDS[method])
    return (
        f"{OPTION}.targets={pattern!r} matches no layer{nearest(pattern, [*ends, *classes])}there are"
        f" {listed(ends, 12) or 'no layers'} of the classes {', '.join(classes) or 'none'}"
    )


def _end(name: str) -> str:
    """Return the end of a name as a pattern, from its last part that isn't a number.

    >>> _end("model.layers.0.q_proj"), _end("body.0.2")
    ('q_proj', 'body.*.*')
    """
    parts = name.split(".")
    start = max((at for at, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join("*" if part.isdigit() and start < at else part for at, part in enumerate(parts) if at >= start)


def _attention_of(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return name of an attention module's ``out_proj`` -> name of the attention module of torch."""
    return {
        f"{name}.out_proj".lstrip("."): name
        for name, part in modules.items()
        if isinstance(part, nn.MultiheadAttention)
    }


def _has_experts(part: nn.Module) -> bool:
    own = [p for p in part._parameters.values() if p is not None]
    return not type(part).__module__.startswith("torch.") and any(p.ndim == 3 and p.shape[0] > 1 for p in own)


def _unfit(name: str, modules: dict[str, nn.Module], weights: dict[int, list[str]]) -> str | None:
    """Return why a layer can't have an adapter that acts and is merged rightly; None if it can."""
    part, (above, _, own) = modules[name], name.rpartition(".")
    mixer = type(modules.get(above, part)).__name__
    if "Mamba" in mixer and own in ("out_proj", "conv1d"):
        return f"whose weight the fused kernel of {mixer} reads without calling it"
    if isinstance(part, nn.MultiheadAttention) and not part._qkv_same_embed_dim:
        return "whose keys or values have another width"
    weight = part._parameters.get("in_proj_weight" if isinstance(part, nn.MultiheadAttention) else "weight")
    if (weight is None and not weights_in(part)) or is_parametrized(part):
        return "whose weight is computed from others"
    if isinstance(part, nn.modules.conv._ConvNd) and (
        {*part.dilation} != {1} or part.padding_mode != "zeros" or part.groups > 1
    ):
        return "whose dilation, padding or groups peft's factors don't have"
    owners = weights[id(weight)] if weight is not None else []
    return f"which shares its weight with another layer ({' and '.join(owners)})" if len(owners) > 1 else None


def _is_frozen(part: nn.Module) -> bool:
    parameters = list(part.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _heads(module: nn.Module, modules: dict[str, nn.Module]) -> dict[int, str]:
    """Return id -> reason for the layers that make a module's outputs.

    They are those that Hugging Face's ``get_output_embeddings`` returns in any part of the module; if there are none,
    the linear layers after the last repeated block; in a module without such blocks its last linear layer.
    """
    heads: dict[int, str] = {}
    for part in modules.values():
        if callable(method := getattr(part, "get_output_embeddings", None)):
            try:
                head = method()
            except (NotImplementedError, AttributeError):
                continue
            if isinstance(head, nn.Module):
                heads[id(plain(head))] = "output head"
    if heads:
        return heads
    linear = {name: part for name, part in modules.items() if _kind(part) in LINEAR}
    if not _is_frozen(module):  # a frozen teacher's are none
        linear = {name: part for name, part in linear.items() if not _is_frozen(part)}
    try:
        after = after_blocks(module)
    except NothingToDoError:
        return {id(part): "the last layer, an output head" for part in list(linear.values())[-1:] if len(linear) > 1}
    return {id(part): "after the last block, an output head" for name, part in linear.items() if name in after}
