"""Patterns select parts and parameters by one grammar, whichever setting takes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_solo.errors import NothingToDoError
from lightning_solo.nn.adapter_targets import named_modules_of, targets_of
from lightning_solo.nn.fake_quantization import Rounding, chosen_layers
from lightning_solo.nn.named_weights import kept_parameters, matching, selected, weights_of
from lightning_solo.nn.prunable import prunable_weights
from lightning_solo.nn.quantizable import chosen_weights
from tests.messages import mentions

NAMES = ["net.embed.weight", "net.blocks.0.up.weight", "net.blocks.1.up.bias"]


def test_pattern_matches_parts_and_ends_of_names() -> None:
    assert matching(NAMES, ["blocks.0"], "x") == {NAMES[1]}
    assert matching(NAMES, ["up", "embed.*"], "x") == set(NAMES)
    assert matching(NAMES, ["*.bias"], "x") == {NAMES[2]}
    with pytest.raises(NothingToDoError, match=mentions("x='block'", "embed, blocks, up")):
        matching(NAMES, ["block"], "x")


def test_whole_name_selects_this_part_alone() -> None:
    names = ["up.weight", "inner.up.weight", "inner.up.bias"]
    assert selected(names, ["up", "inner.up.weight", "u[pq]"]) == {
        "up": {names[0]},
        "inner.up.weight": {names[1]},
        "u[pq]": set(names),
    }
    assert selected(names, ["inner"], directly=True) == {"inner": set()}


class Shared(nn.Module):
    """A block with two layers, one of which has two names; a layer tied to an embedding; and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.again, self.head = self.block[0], nn.Linear(16, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("block", {"block.0", "block.1"}),
        ("block.*", {"block.0", "block.1"}),
        ("again", {"block.0"}),
        ("again.weight", {"block.0"}),
        ("?.weight", {"block.0", "block.1"}),
    ],
)
def test_all_techniques_select_the_same_layers(pattern: str, expected: set[str]) -> None:
    module = Shared()
    assert {name.removesuffix(".weight") for name in prunable_weights(module, [pattern]).weights} == expected
    assert chosen_layers(module, Rounding(4, 0), [pattern]).layers.keys() == expected
    assert chosen_weights(module.requires_grad_(False), [pattern]).modules.keys() == expected
    if pattern in ("block.*", "again"):  # of adapters' targets each must be a layer
        assert targets_of(module, [pattern], "lora").layers.keys() == expected
        assert named_modules_of(module, [pattern], "x").keys() == expected


def test_tied_weights_are_one_with_all_names() -> None:
    module = Shared()
    (table,) = (
        weight for weight in weights_of(module.named_modules(remove_duplicate=False)) if "embed.weight" in weight.users
    )
    assert list(table.users) == ["embed.weight", "head.weight"]
    assert table.kinds == {"embedding", "linear"}
    assert kept_parameters(module) == {id(module.embed.weight): "output head"}
    (layer,) = (
        each
        for each in weights_of(module.named_modules(remove_duplicate=False))
        if each.parameter is module.again.weight
    )
    assert list(layer.users) == ["block.0.weight", "again.weight"]
    assert list(layer.layers) == ["block.0.weight"]


def test_heads_and_embeddings_inside_a_selected_part_stay() -> None:
    """What a technique leaves out by itself is selected by its own name or its module's alone."""
    outer = nn.ModuleDict({"net": Shared()})
    assert chosen_layers(outer, Rounding(4, 0), ["net"]).layers.keys() == {"net.block.0", "net.block.1"}
    assert chosen_layers(outer, Rounding(4, 0), ["head"]).layers.keys() == {"net.head", "net.embed"}
    assert prunable_weights(outer, ["net"]).left_out == {"net.embed.weight": "tied to an embedding"}
    with torch.no_grad():
        assert "net.embed.weight" in prunable_weights(outer, ["head"]).weights
