"""Parameters by kind: those that weight decay spares, and the matrices of blocks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_solo.errors import NothingToDoError
from lightning_solo.nn.parameter_groups import hidden_matrices, parameter_groups, tables, without_decay
from lightning_solo.optim.muon import MuonAdamW
from lightning_solo.reference.byte_gpt import ByteGPT
from tests.messages import mentions

HIDDEN = {"attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"}


def model() -> ByteGPT:
    return ByteGPT(width=16, depth=2, heads=2, context=8)


def names(module: nn.Module, parameters: set[torch.Tensor]) -> set[str]:
    return {name for name, p in module.named_parameters() if p in parameters}


def test_kinds_of_a_language_model() -> None:
    module = model()
    assert names(module, tables(module)) == {"embedding.weight", "positions.weight"}  # the head is tied
    vectors = {name for name, p in module.named_parameters() if p.dim() < 2}
    assert names(module, without_decay(module)) == vectors
    still = without_decay(module, decay_embeddings=False)
    assert names(module, still) == vectors | {"embedding.weight", "positions.weight"}
    assert names(module, hidden_matrices(module)) == {f"blocks.{block}.{name}" for block in (0, 1) for name in HIDDEN}


def test_norms_and_biases_of_more_dimensions_do_not_decay() -> None:
    attention, norm = nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.LayerNorm([2, 2])
    assert names(norm, without_decay(norm)) == {"weight", "bias"}
    assert names(attention, without_decay(attention)) == {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"}


def test_groups_have_each_trained_parameter_once() -> None:
    module = model()
    module.blocks[0].mlp.up.weight.requires_grad_(False)  # type: ignore[union-attr, operator, index]
    trained = [p for p in module.parameters() if p.requires_grad]
    for make in (torch.optim.AdamW, partial(MuonAdamW, lr=1e-2)):
        groups = parameter_groups(module, make)
        counted = [p for group in groups for p in group["params"]]
        assert len(counted) == len(set(counted)) == len(trained)
        assert [group.get("weight_decay") for group in groups] == [*[None] * (len(groups) - 1), 0.0]
    assert [group.get("matrices", False) for group in groups] == [True, False, False]
    assert len(groups[0]["params"]) == 7


def test_module_without_blocks_is_refused() -> None:
    with pytest.raises(NothingToDoError, match=mentions("here.blocks")):
        hidden_matrices(nn.Sequential(nn.Linear(2, 2)), option="here.blocks")
    with pytest.raises(NothingToDoError, match=mentions("here.blocks", "matrices")):
        hidden_matrices(nn.Sequential(nn.LayerNorm(2)), ["LayerNorm"], "here.blocks")
