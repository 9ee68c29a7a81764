"""The frozen weights of a module that can be quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_solo.errors import ConflictError, NothingToDoError, listed
from lightning_solo.nn.adapted import plain_modules
from lightning_solo.nn.named_weights import (
    OUTPUT_HEAD,
    ROWS_TRAINED,
    TIED,
    Weight,
    kept_parameters,
    kind_of,
    selected,
    weights_of,
)
from lightning_solo.nn.quantized import FLOATS

OPTION = "callback.quantized_base"
_OF_TABLES = (TIED, OUTPUT_HEAD, ROWS_TRAINED, "it isn't a plain embedding")


@dataclass
class Choice:
    """The weights to quantize.

    Attributes:
        modules: qualified name without adapters -> (module, names of its parameters).
        tables: id of a parameter of an embedding or an output head -> (setting, its value).
        left_out: qualified name of a frozen matrix that is left as it is -> the reason.
        left_bytes: bytes of those.
    """

    modules: dict[str, tuple[nn.Module, list[str]]] = field(default_factory=dict)
    tables: dict[int, tuple[str, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    left_bytes: int = 0

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return qualified name -> parameter to quantize; tied ones under several names."""
        return {
            f"{name}.{own}" if name else own: part.get_parameter(own)
            for name, (part, names) in self.modules.items()
            for own in names
        }


def chosen_weights(
    module: nn.Module,
    patterns: Sequence[str] | None = None,
    *,
    embeddings: str = "unchanged",
    head: str = "unchanged",
    required: bool = True,
) -> Choice:
    """Return the frozen weights that can be quantized.

    These are weights of linear layers, of transformers' ``Conv1D``, and parameters of three dimensions of modules that
    aren't torch's own, such as the experts of a mixture. Embeddings and output heads, which are the linear layers after
    the last block where nothing else says so, are chosen by settings of their own; a weight that is both, if both
    settings are the same. Other layers that share a weight with an embedding are left out.

    Args:
        module: with frozen weights.
        patterns: of qualified names of modules or parameters; None for all.
        embeddings: "int8" or "host" chooses frozen embeddings.
        head: "int8" or "host" chooses frozen output heads.
        required: whether it is an error if there is none.

    Raises:
        NothingToDoError: no frozen weight can be quantized, or a pattern matches none.
        ConflictError: a pattern matches a weight that is trained.
    """
    choice, trained, trained_tables, matched = Choice(), list[str](), list[str](), set[str]()
    settings = {"embeddings": embeddings, "head": head}
    weights, apart = weights_of(plain_modules(module, remove_duplicate=False)), kept_parameters(module)
    hits = selected([name for weight in weights for name in weight.users], patterns or ())
    for weight in weights:
        p = weight.parameter
        if p.ndim < 2:
            continue
        mine = [pattern for pattern, names in hits.items() if names & weight.users.keys()]
        reason, table = _table(weight, apart.get(id(p)), settings)
        others = (unsuitable(part, full.rpartition(".")[2], p) for full, part in weight.layers.items())
        reason = reason or next(filter(None, others), None)  # a tied weight is stored in one way for all its layers
        trained_tables.extend(weight.layers if table and p.requires_grad else ())
        left_bytes = 0
        for full, part in weight.layers.items():
            name, _, own = full.rpartition(".")
            if reason is None:
                matched.update(mine)
            if p.requires_grad and reason is None:
                _refuse_trained(full, mine)
                trained.append(full)
            elif not p.requires_grad and reason is None and (mine or patterns is None or table):
                choice.modules.setdefault(name, (part, []))[1].append(own)
                if table:
                    choice.tables[id(p)] = table
            elif not p.requires_grad and p.is_floating_point():
                left_bytes = p.nbytes  # once, under however many names
                choice.left_out[full] = reason or "no pattern matches it"
        choice.left_bytes += left_bytes
    if missed := [each for each in patterns or () if each not in matched]:
        linear = [weight.name.removesuffix(".weight") for weight in weights if weight.kinds & {"linear", "transposed"}]
        raise NothingToDoError(
            f"{OPTION}.layers={missed[0]!r} matches no weight that can be quantized; there are"
            f" {listed(linear, 8) or 'no linear layers'}"
        )
    if required:
        _refuse_nothing(choice, trained, trained_tables, type(module).__name__, settings)
    return choice


def _table(weight: Weight, apart: str | None, settings: Mapping[str, str]) -> tuple[str | None, tuple[str, str] | None]:
    """Return why a weight is left out, or the setting and value by which an embedding or output head is chosen."""
    roles = ["embeddings"] * ("embedding" in weight.kinds) + ["head"] * (apart == OUTPUT_HEAD)
    values = {settings[role] for role in roles}
    if values <= {"unchanged"} or apart not in (None, OUTPUT_HEAD):
        return apart or ("an embedding" if roles else None), None
    if len(values) > 1:
        value = next(each for each in sorted(values) if each != "unchanged")
        return f"{TIED}; write {OPTION}.embeddings={value} and {OPTION}.head={value}", None
    return None, (roles[-1], values.pop())


def _refuse_trained(name: str, hits: Sequence[str]) -> None:
    if hits:
        raise ConflictError(
            f"{OPTION}.layers={hits[0]!r} matches {name}, which is trained: a weight in 4 or 8 bits can't be. Freeze it"
            " by requires_grad_(False) and train adapters or other layers, or write patterns that leave it out, or"
            f" ~{OPTION}"
        )


def _refuse_nothing(
    choice: Choice, trained: Sequence[str], trained_tables: Sequence[str], kind: str, settings: Mapping[str, str]
) -> None:
    """Refuse a choice without a weight, or without an embedding or output head where these are asked for."""
    reasons = {name: f"{name} ({reason})" for name, reason in choice.left_out.items()}
    found = {role for role, _ in choice.tables.values()}
    if any(isinstance(part, nn.Embedding) for part, _ in choice.modules.values()):
        found.add("embeddings")
    words = {"embeddings": "frozen embedding", "head": "frozen output head"}
    for role in [role for role, value in settings.items() if value != "unchanged" and role not in found]:
        found_tables = [text for name, text in reasons.items() if choice.left_out[name].startswith(_OF_TABLES)]
        tables = ", ".join([*found_tables, *(f"{name} (trained)" for name in trained_tables)])
        raise NothingToDoError(
            f"{OPTION}.{role}={settings[role]}: {kind} has no {words[role]} that can be stored so"
            f"{f'; there are {tables}' if tables else ''}; write {OPTION}.{role}=unchanged"
        )
    if not choice.modules and trained:
        raise NothingToDoError(
            f"quantized_base: no frozen weight to quantize in {kind}; {len(trained)} weights could be quantized if they"
            f" were frozen ({listed(trained)}), but full fine-tuning trains them, which 4 and 8 bits can't hold. Freeze"
            f" them by requires_grad_(False) and train adapters or other layers, or write ~{OPTION}"
        )
    if not choice.modules:
        raise NothingToDoError(
            f"quantized_base: no weight to quantize in {kind}; frozen are {listed([*reasons.values()], 5) or 'none'};"
            f" write ~{OPTION}"
        )


def unsuitable(part: nn.Module, name: str, p: nn.Parameter) -> str | None:
    """Return why a parameter can't be quantized, or None."""
    if p.dtype not in (*FLOATS, torch.float64):
        return f"its type is {p.dtype}"
    if "forward" in vars(part) or hasattr(part, "parametrizations"):
        return f"{type(part).__name__} is changed by something else"
    if isinstance(part, ParametrizationList):
        return "a parametrization computes the weight from it"
    if name.endswith(("_orig", "_g", "_v")) and name.rpartition("_")[0] not in part._parameters:
        return f"{type(part).__name__} computes its weight from it, as under torch.nn.utils.prune"
    kind = kind_of(part, name)
    if kind == "linear":
        is_plain = type(part).forward is nn.Linear.forward
        # the attention module reads the weight of its out_proj, and never calls it
        if not is_plain or isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return f"{type(part).__name__} isn't computed as a linear layer"
        return None
    if kind == "embedding":
        if type(part).forward is not nn.Embedding.forward or part.max_norm is not None:
            return "it isn't a plain embedding"
        return None
    return None if kind in ("transposed", "experts") else f"of {type(part).__name__}"
