"""The frozen weights of a module that can be quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_solo.errors import ConflictError, NothingToDoError, listed
from lightning_solo.nn.adapted import plain_modules
from lightning_solo.nn.named_weights import kept_parameters, kind_of, selected, weights_of
from lightning_solo.nn.quantized import FLOATS

OPTION = "callback.quantized_base"


@dataclass
class Choice:
    """The weights to quantize.

    Attributes:
        modules: qualified name without adapters -> (module, names of its parameters).
        left_out: qualified name of a frozen matrix that is left as it is -> the reason.
        left_bytes: bytes of those.
    """

    modules: dict[str, tuple[nn.Module, list[str]]] = field(default_factory=dict)
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
    module: nn.Module, patterns: Sequence[str] | None = None, *, embeddings: bool = False, required: bool = True
) -> Choice:
    """Return the frozen weights that can be quantized.

    These are weights of linear layers, of transformers' ``Conv1D``, and parameters of three dimensions of modules that
    aren't torch's own, such as the experts of a mixture. Output heads are left out, which are the linear layers after
    the last block where nothing else says so, and what shares a weight with one or with an embedding.

    Args:
        module: with frozen weights.
        patterns: of qualified names of modules or parameters; None for all.
        embeddings: whether frozen embeddings are chosen, too.
        required: whether it is an error if there is none.

    Raises:
        NothingToDoError: no frozen weight can be quantized, or a pattern matches none.
        ConflictError: a pattern matches a weight that is trained.
    """
    choice, trained, matched = Choice(), list[str](), set[str]()
    weights, apart = weights_of(plain_modules(module, remove_duplicate=False)), kept_parameters(module)
    hits = selected([name for weight in weights for name in weight.users], patterns or ())
    for weight in weights:
        p = weight.parameter
        if p.ndim < 2:
            continue
        mine = [pattern for pattern, names in hits.items() if names & weight.users.keys()]
        for full, part in weight.layers.items():
            name, _, own = full.rpartition(".")
            is_table = kind_of(part, own) == "embedding"
            reason = apart.get(id(p)) or unsuitable(part, own, p, embeddings)
            if reason is None:
                matched.update(mine)
            if p.requires_grad and reason is None:
                _refuse_trained(full, mine)
                trained.append(full)
            elif not p.requires_grad and reason is None and (mine or patterns is None or is_table):
                choice.modules.setdefault(name, (part, []))[1].append(own)
            elif not p.requires_grad and (embeddings or not is_table) and p.is_floating_point():
                choice.left_out[full] = reason or "no pattern matches it"
                choice.left_bytes += p.nbytes
    if missed := [each for each in patterns or () if each not in matched]:
        linear = [weight.name.removesuffix(".weight") for weight in weights if weight.kinds & {"linear", "transposed"}]
        raise NothingToDoError(
            f"{OPTION}.layers={missed[0]!r} matches no weight that can be quantized; there are"
            f" {listed(linear, 8) or 'no linear layers'}"
        )
    if required:
        _refuse_nothing(choice, trained, type(module).__name__, embeddings)
    return choice


def _refuse_trained(name: str, hits: Sequence[str]) -> None:
    if hits:
        raise ConflictError(
            f"{OPTION}.layers={hits[0]!r} matches {name}, which is trained: a weight in 4 or 8 bits can't be. Freeze it"
            " by requires_grad_(False) and train adapters or other layers, or write patterns that leave it out, or"
            f" ~{OPTION}"
        )


def _refuse_nothing(choice: Choice, trained: Sequence[str], kind: str, embeddings: bool) -> None:
    """Refuse a choice without a weight, or without an embedding where these are asked for."""
    reasons = {name: f"{name} ({reason})" for name, reason in choice.left_out.items()}
    if embeddings and not any(isinstance(part, nn.Embedding) for part, _ in choice.modules.values()):
        tables = ", ".join(text for name, text in reasons.items() if "embedding" in choice.left_out[name])
        raise NothingToDoError(
            f"{OPTION}.embeddings=int8: {kind} has no frozen embedding of its own"
            f"{f'; there are {tables}' if tables else ''}; write {OPTION}.embeddings=unchanged"
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


def unsuitable(part: nn.Module, name: str, p: nn.Parameter, embeddings: bool) -> str | None:
    """Return why a parameter can't be quantized, or None."""
    if p.dtype not in (*FLOATS, torch.float64):
        return f"its type is {p.dtype}"
    if "forward" in vars(part) or hasattr(part, "parametrizations"):
        return f"{type(part).__name__} is changed by something else"
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
        return None if embeddings else "an embedding"
    return None if kind in ("transposed", "experts") else f"of {type(part).__name__}"
