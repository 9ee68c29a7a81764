"""Layers whose weight is the product of two factors. This file needs torch and safetensors alone.

`lightning-solo export --format factorized` writes a copy of it beside the weights, as ``load.py``:

    from load import load
    model = load(MyModel(), "folder")

Each layer is two of torch's in a sequence, with their names in the state dict:

    linear       Linear(inputs, rank, bias=False), Linear(rank, outputs)    layer.0.weight, layer.1.weight, layer.1.bias
    embedding    Embedding(rows, rank), Linear(rank, width, bias=False)     layer.0.weight, layer.1.weight

A head that is tied to an embedding has the embedding's factors in the other order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Module = TypeVar("Module", bound=nn.Module)


class Factorized(nn.Sequential):
    """Two layers in place of one. ``weight`` is the weight of that one, computed for who reads it."""

    kind = ""
    rows_at = 1
    """Which of the two layers has the factor (rows, rank)."""

    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return (rows, rank) and what is multiplied with it: (rank, columns), of an embedding (columns, rank)."""
        return self.get_parameter(f"{self.rows_at}.weight"), self.get_parameter(f"{1 - self.rows_at}.weight")

    def options(self) -> dict[str, Any]:
        """Return what builds a layer of this form."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The weight in place of which the factors are, with its gradient."""
        first, second = self.factors()
        return first @ (second if self.kind == "linear" else second.t())

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, of the second layer."""
        return cast("nn.Parameter | None", getattr(self[1], "bias", None))

    @property
    def rank(self) -> int:
        """Columns of the first factor, which may be sharded."""
        return cast(nn.Linear, self[1]).in_features


class LinearFactors(Factorized):
    """A linear layer: (..., inputs) -> (..., rank) -> (..., outputs)."""

    kind = "linear"

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = True, **where: Any) -> None:
        skip: Any = nn.utils.skip_init  # no random numbers are drawn
        super().__init__(
            skip(nn.Linear, inputs, rank, bias=False, **where), skip(nn.Linear, rank, outputs, bias=bias, **where)
        )

    @property
    def in_features(self) -> int:
        """Inputs."""
        return cast(nn.Linear, self[0]).in_features

    @property
    def out_features(self) -> int:
        """Outputs."""
        return cast(nn.Linear, self[1]).out_features

    def options(self) -> dict[str, Any]:
        sizes = {"inputs": self.in_features, "outputs": self.out_features, "rank": self.rank}
        return {"kind": self.kind, **sizes, "bias": self.bias is not None}


class EmbeddingFactors(Factorized):
    """An embedding: indices (...) -> (..., rank) -> (..., width)."""

    kind = "embedding"
    rows_at = 0

    def __init__(self, rows: int, width: int, rank: int, padding_idx: int | None = None, **where: Any) -> None:
        skip: Any = nn.utils.skip_init
        table = skip(nn.Embedding, rows, rank, padding_idx=padding_idx, **where)
        super().__init__(table, skip(nn.Linear, rank, width, bias=False, **where))
        self.num_embeddings, self.embedding_dim, self.padding_idx = rows, width, padding_idx

    def options(self) -> dict[str, Any]:
        sizes = {"rows": self.num_embeddings, "width": self.embedding_dim, "rank": self.rank}
        return {"kind": self.kind, **sizes, "padding_idx": self.padding_idx}


class Transposed(nn.Module):
    """A product with a weight as it is stored: (..., inputs) -> (..., outputs)."""

    def __init__(self, inputs: int, outputs: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs, **where))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t())


class HeadFactors(Factorized):
    """A linear layer with the factors of a `EmbeddingFactors`: (..., width) -> (..., rank) -> (..., rows)."""

    kind = "head"

    def __init__(self, rows: int, width: int, rank: int, bias: bool = False, **where: Any) -> None:
        skip: Any = nn.utils.skip_init
        super().__init__(Transposed(width, rank, **where), skip(nn.Linear, rank, rows, bias=bias, **where))
        self.in_features, self.out_features = width, rows

    def options(self) -> dict[str, Any]:
        sizes = {"rows": self.out_features, "width": self.in_features, "rank": self.rank}
        return {"kind": self.kind, **sizes, "bias": self.bias is not None}


KINDS: dict[str, type[Factorized]] = {each.kind: each for each in (LinearFactors, EmbeddingFactors, HeadFactors)}


def built(options: Mapping[str, Any], **where: Any) -> Factorized:
    """Return a layer of a form, with numbers of no meaning, of a type and on a device."""
    return KINDS[options["kind"]](**{name: value for name, value in options.items() if name != "kind"}, **where)


def put(module: nn.Module, before: nn.Module, after: nn.Module) -> None:
    """Put a layer in the place of another, under each of its names."""
    for part in module.modules():
        for name, child in part._modules.items():
            if child is before:
                part._modules[name] = after


def put_factors(module: nn.Module, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Put factorized layers into a module of the user's class: name -> form; their weights are not set."""
    for name, options in layers.items():
        before: Any = module.get_submodule(name)
        if not isinstance(before, Factorized):  # one that has two names
            put(module, before, built(options, device=before.weight.device, dtype=before.weight.dtype))


def tie(module: nn.Module, names: Mapping[str, str]) -> None:
    """Make parameters the same object as others: name -> name of the other."""
    for name, first in names.items():
        part, _, own = name.rpartition(".")
        setattr(module.get_submodule(part), own, module.get_parameter(first))


def load(module: Module, folder: str | Path) -> Module:
    """Put factorized layers into a module of the user's class, load all its weights, and return it.

    Raises:
        AttributeError: the module lacks a layer of the folder.
        RuntimeError: the folder's weights are of another module.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    put_factors(module, config["layers"])
    inside = tuple(f"{name}." for name in config["layers"])
    tie(module, {name: first for name, first in config["tied"].items() if name.startswith(inside)})
    weights.update({name: weights[first] for name, first in config["tied"].items()})
    module.load_state_dict(weights)
    return module
