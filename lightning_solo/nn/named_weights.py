"""The weights of a module: names, the layers that use them, what they are there, and which of them a pattern selects.

One grammar selects parts of a module by name, in every setting that takes patterns:

- a whole name selects this part or parameter alone;
- any other pattern selects each part or parameter whose name it matches, or the end of whose name after a dot: ``*`` is
  any text, ``?`` a character, ``[01]`` one of these;
- a part stands for all parameters in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_solo.errors import ConflictError, NothingToDoError, listed, nearest
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.blocks import after_blocks
from lightning_solo.nn.deferred_logits import output_heads

OUTPUT_HEAD, TIED, ROWS_TRAINED = "output head", "tied to an embedding", "rows of it are trained"
"""Why a weight keeps full precision."""
_OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


# --- patterns ---


def named(names: Collection[str], pattern: str) -> list[str]:
    """Return the qualified names that a pattern is, or which it matches, in their order.

    >>> named(["up", "a.up", "a.down"], "up"), named(["b.up", "a.up", "a.down"], "u*")
    (['up'], ['b.up', 'a.up'])
    """
    if pattern in names:
        return [pattern]
    return [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]


def selected(names: Iterable[str], patterns: Iterable[str], *, directly: bool = False) -> dict[str, set[str]]:
    """Return pattern -> the names of parameters that it selects.

    Args:
        names: qualified names of parameters.
        patterns: of names of parameters or parts.
        directly: whether only the names of a parameter and of its own module count, and no part further outside.

    >>> selected(["a.up.weight", "b.a.up.bias"], ["a.up", "up.w*", "down", "b"])
    {'a.up': {'a.up.weight'}, 'up.w*': {'a.up.weight'}, 'down': set(), 'b': {'b.a.up.bias'}}
    """
    parents = {name: _parents(name) for name in names}
    whole = {each for parts in parents.values() for each in parts}
    if directly:
        parents = {name: parts[-2:] for name, parts in parents.items()}
    return {
        pattern: {name for name, parts in parents.items() if not hits.isdisjoint(parts)}
        for pattern in patterns
        for hits in [set(named(whole, pattern))]
    }


def matching(names: Iterable[str], patterns: Sequence[str], option: str) -> set[str]:
    """Return the names of parameters that patterns select.

    Raises:
        NothingToDoError: a pattern selects nothing; the message lists the parts.
    """
    names = list(names)
    hits = selected(names, patterns)
    if missed := [pattern for pattern, each in hits.items() if not each]:
        parts = dict.fromkeys(part for name in names for part in name.split(".")[:-1] if not part.isdigit())
        raise NothingToDoError(
            f"{option}={missed[0]!r} matches no parameter{nearest(missed[0], parts)}there are {listed(parts, 12)}"
        )
    return set().union(*hits.values())


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# --- weights ---


@dataclass(eq=False)
class Weight:
    """A parameter; a tied one is one weight."""

    parameter: nn.Parameter  # the parameter
    # qualified name of the parameter -> the module that has it under this name, in module order
    users: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first of its names."""
        return next(iter(self.users))

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The names without further ones of a module that has several."""
        first: dict[tuple[int, str], str] = {}
        for name, part in self.users.items():
            first.setdefault((id(part), name.rpartition(".")[2]), name)
        return {name: self.users[name] for name in first.values()}

    @property
    def kinds(self) -> set[str | None]:
        """What it is in its modules, as `kind_of` says."""
        return {kind_of(part, name.rpartition(".")[2]) for name, part in self.users.items()}


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters that have a shape."""
    return sum(p.nbytes for p in module.parameters() if not isinstance(p, UninitializedParameter))


def weights_of(modules: Iterable[tuple[str, nn.Module]]) -> list[Weight]:
    """Return the parameters of modules, each once.

    Args:
        modules: qualified names and modules; all names of each, so that patterns can match any.
    """
    weights: dict[nn.Parameter, Weight] = {}
    for name, part in modules:
        for own, p in part._parameters.items():
            if p is not None:
                weights.setdefault(p, Weight(p)).users[f"{name}.{own}" if name else own] = part
    return list(weights.values())


def kind_of(part: nn.Module, own: str) -> str | None:
    """Return what a parameter is in its module.

    It is the weight of a ``linear`` layer, of transformers' ``Conv1D``, which is ``transposed``, of a ``convolution``,
    an ``embedding``, a ``recurrent`` layer, or torch's ``attention``; or a parameter of three dimensions of a module
    that isn't torch's own: ``experts`` of a mixture. None is any other.
    """
    if isinstance(part, nn.MultiheadAttention):
        return "attention" if own in _OF_ATTENTION else None
    if isinstance(part, nn.RNNBase):
        return "recurrent" if own.startswith("weight_") else None
    if own == "weight":
        for kind, classes in (
            ("linear", nn.Linear),
            ("convolution", nn.modules.conv._ConvNd),
            ("embedding", (nn.Embedding, nn.EmbeddingBag)),
        ):
            if isinstance(part, classes):
                return kind
        if type(part).__name__ == "Conv1D":
            return "transposed"
    p = part._parameters[own]
    is_torchs = type(part).__module__.startswith("torch.")
    return "experts" if not is_torchs and p is not None and p.ndim == 3 and p.shape[0] > 1 else None


def kept_parameters(module: nn.Module) -> dict[int, str]:
    """Return id of parameter -> why it keeps full precision: weights of output heads, and those tied to embeddings."""
    kept: dict[int, str] = {}
    heads: list[nn.Module] = []
    with suppress(NothingToDoError, ConflictError):
        heads = [part for part in after_blocks(module).values() if isinstance(part, nn.Linear)]
        heads = [part for part in heads if not isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear)]
    with suppress(NothingToDoError, ConflictError):
        heads = list(output_heads(module).values())
    for weight in weights_of(plain_modules(module, remove_duplicate=False)):
        if "embedding" in weight.kinds and weight.kinds != {"embedding"}:
            kept[id(weight.parameter)] = TIED
    for head in heads:
        if (own := head._parameters.get("weight")) is not None:
            kept[id(own)] = OUTPUT_HEAD
    for wrapper in [part for part in module.modules() if "token_adapter" in part._modules]:
        kept.update({id(p): ROWS_TRAINED for p in plain(wrapper)._parameters.values() if p is not None})
    return kept
