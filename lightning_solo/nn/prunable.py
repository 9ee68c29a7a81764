"""The weights of a module that can be pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_solo.errors import ConflictError, NothingToDoError, listed
from lightning_solo.nn.named_weights import Weight, matching, selected, weights_of
from lightning_solo.nn.quantized import weights_in

OPTION = "callback.pruning"
FOURS = 4
"""Size of the groups of the pattern 2:4, along a layer's inputs."""


@dataclass
class Choice:
    """The weights to prune.

    Attributes:
        weights: qualified name -> parameter, in module order; a tied one under its first name.
        transposed: names of weights of shape (in, out), as those of transformers' ``Conv1D``.
        left_out: qualified name of a weight that isn't pruned -> the reason.
    """

    weights: dict[str, nn.Parameter] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)


def prunable_weights(
    module: nn.Module, layers: Sequence[str] | None = None, kept: Sequence[str] = (), *, in_fours: bool = False
) -> Choice:
    """Return the weights that can be pruned.

    Without patterns these are the trained weights of linear, convolution, recurrent and attention layers, and
    parameters of three dimensions of modules that aren't torch's own, such as the experts of a mixture. Weights that
    are tied to an embedding are left out. A pattern selects them, embeddings and other matrices too, by the name of the
    parameter or of its module.

    Args:
        module: the module.
        layers: patterns of names of parts, modules or parameters; None for all.
        kept: patterns of those that aren't pruned.
        in_fours: whether two of each four inputs are pruned.

    Raises:
        NothingToDoError: no weight can be pruned, or a pattern matches nothing.
        ConflictError: a pattern matches a weight that can't be pruned; a weight is pruned by torch's own functions; a
            layer's inputs can't be grouped in fours.
    """
    weights, computed = weights_of(module.named_modules(remove_duplicate=False)), dict(_computed(module))
    names = [*(name for weight in weights for name in weight.users), *computed]
    hits = set(names) if layers is None else matching(names, layers, f"{OPTION}.layers")
    asked = set[str]().union(*selected(names, layers or (), directly=True).values())
    spared = matching(names, kept, f"{OPTION}.kept")
    choice, refused = Choice(), {}
    for weight in weights:
        p, name, every = weight.parameter, weight.name, set(weight.users)
        if every & spared:
            choice.left_out[name] = f"in {OPTION}.kept"
            continue
        if not every & hits or p.ndim < 2:
            continue
        reason = None if every & asked else _unusual(weight)
        if reason is None and (reason := _unsuitable(p)) is not None and layers is not None:
            refused[name] = reason
        if reason is not None:
            choice.left_out[name] = reason
            continue
        choice.weights[name] = p
        if "transposed" in weight.kinds:
            choice.transposed.add(name)
    refused |= {name: reason for name, reason in computed.items() if layers is not None and name in hits - spared}
    if refused:
        name, reason = next(iter(refused.items()))
        raise ConflictError(
            f"{OPTION}.layers matches {name}, which is {reason} and can't be pruned; write patterns that leave it out,"
            f" or {OPTION}.kept=[{name}]"
        )
    choice.left_out |= {name: reason for name, reason in computed.items() if name not in spared}
    if in_fours:
        _keep_fours(choice, module, asked=layers is not None)
    if not choice.weights:
        raise NothingToDoError(
            f"{OPTION} finds no weight to prune in {type(module).__name__}; it leaves out"
            f" {listed([f'{name} ({reason})' for name, reason in choice.left_out.items()], 8) or 'nothing'}; parameters"
            f" of two or more dimensions are {listed(_matrices(module), 8) or 'none'}: write {OPTION}.layers=[<names>],"
            " or ~callback.pruning"
        )
    return choice


def _unusual(weight: Weight) -> str | None:
    """Return why a weight is pruned only where a pattern names it or its module, or None."""
    if "embedding" in weight.kinds:
        return "an embedding" if len(weight.users) == 1 else "tied to an embedding"
    kinds = {type(part).__name__ for part in weight.users.values()}
    return f"of {min(kinds)}" if weight.kinds == {None} else None


def _unsuitable(p: nn.Parameter) -> str | None:
    """Return why a weight can't be pruned, or None."""
    if isinstance(p, UninitializedParameter):
        return "without a shape before its first batch"
    if is_traceable_wrapper_subclass(p):
        return f"stored as {type(p).__name__}"
    if not p.requires_grad:
        return "frozen"
    if not p.numel():
        return "empty"
    return None if p.is_floating_point() else f"of type {p.dtype}"


def _computed(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, reason) of weights that are no parameters of their layer."""
    for name, part in module.named_modules():
        own = {each.removesuffix("_mask") for each in part._buffers if each.endswith("_mask")}
        if masked := [each for each in own if f"{each}_orig" in part._parameters]:
            raise ConflictError(
                f"{OPTION} and torch.nn.utils.prune, which prunes {name}.{masked[0]} already; call"
                f' torch.nn.utils.prune.remove(module.get_submodule("{name}"), "{masked[0]}") first, or write'
                " ~callback.pruning"
            )
        prefix = f"{name}." if name else ""
        yield from ((f"{prefix}{each}", "in 4 or 8 bits") for each in weights_in(part))
        if is_parametrized(part):
            yield from ((f"{prefix}{each}", "computed by a parametrization") for each in part.parametrizations)
        if "weight" not in part._parameters and {"weight_g", "weight_orig"} & set(part._parameters):
            yield f"{prefix}weight", "computed from other parameters"


def _keep_fours(choice: Choice, module: nn.Module, *, asked: bool) -> None:
    """Leave weights out whose inputs aren't known."""
    odd = {}
    for name, p in list(choice.weights.items()):
        inputs = p.shape[0] if name in choice.transposed else p.shape[-1]
        if p.ndim > 2 or not p.is_contiguous():
            choice.left_out[name] = "no matrix of a linear layer, which 2:4 needs"
            del choice.weights[name]
        elif inputs % FOURS:
            odd[name] = inputs
    if odd:
        name, inputs = next(iter(odd.items()))
        raise ConflictError(
            f"{OPTION}.pattern=2:4 and {name} with {inputs} inputs, which is no multiple of {FOURS}; write"
            f" {OPTION}.kept=[{','.join(odd)}], or {OPTION}.pattern=unstructured"
        )


def _matrices(module: nn.Module) -> list[str]:
    uninitialized = UninitializedParameter
    return [name for name, p in module.named_parameters() if not isinstance(p, uninitialized) and p.ndim > 1]
