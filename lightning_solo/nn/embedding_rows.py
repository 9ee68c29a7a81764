"""Rows of an embedding and of the output head for new tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def add_rows(model: Any, pieces: Mapping[int, Sequence[int]]) -> None:
    """Give new tokens rows in a model of transformers: each starts at the mean of the rows of its pieces.

    Embedding and head are enlarged if they have too few rows; many models have some to spare.

    Args:
        model: of transformers.
        pieces: id of a new token -> tokens that stood for its text before.
    """
    if not pieces:
        return
    if max(pieces) >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(max(pieces) + 1, mean_resizing=False)
    weights = {id(part.weight): part.weight for part in _tables(model) if not part.weight.is_meta}
    for weight in weights.values():
        for row, others in pieces.items():
            weight[row] = weight[list(others)].float().mean(0).to(weight.dtype)


def names_of_tables(module: nn.Module, model: Any) -> list[str]:
    """Return the qualified names in ``module`` of a model's embedding, and of its head if that has its own weight."""
    own = {id(part.weight): part for part in reversed(_tables(model))}
    return [name for name, part in module.named_modules() if any(part is each for each in own.values())]


def _tables(model: Any) -> list[Any]:
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [table for table in tables if table is not None]
