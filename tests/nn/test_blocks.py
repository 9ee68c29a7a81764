"""Blocks are found by how a model is built, under any names."""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_solo.errors import NothingToDoError
from lightning_solo.nn.blocks import blocks_of_class, repeated_blocks
from tests.messages import mentions, nearest
from tests.models import SIZES, small_model
from tests.modules import Block, Stack


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width, bias), nn.GELU(), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class VitBlock(nn.Module):
    """Shaped as timm's: norm1, attn, ls1, norm2, mlp."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(width), Attention(width), nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Vit(nn.Module):
    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.patch_embed = nn.Sequential(nn.Conv2d(3, width, 4), nn.Identity())
        self.blocks = nn.Sequential(*[VitBlock(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Experts(nn.Module):
    """A layer of a mixture of experts, whose experts hold nearly all parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 8)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Routed(nn.Module):
    """A mixture of experts without a norm of its own."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(8, 4, bias=False), Mlp(8, bias=False)
        self.experts = nn.ModuleList(Mlp(8, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 8)
        self.student, self.teacher = Vit(), Vit()


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((VitBlock if i % 2 else Experts)(8) for i in range(6))


class Wide(nn.Module):
    """Blocks of 1,136 parameters in all, beside a layer of 2,304."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.up = nn.ModuleList(Block(8) for _ in range(2)), nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x


def shared() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *[Block(8)] * 4)


def levels() -> nn.Module:
    return nn.ModuleList(nn.ModuleList(Block(4 * 2**i) for _ in range(2)) for i in range(3))


TEXT, SEQUENCES, STAGES = "ForCausalLM", "ForConditionalGeneration", {"hidden_sizes": [8, 16, 16], "depths": [2, 3, 1]}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
CLIP = {"text_config": SIZES, "vision_config": SIZES, "projection_dim": 8}
BASIC = {"embedding_size": 8, "layer_type": "basic", **STAGES}
TRANSFORMERS: list[tuple[str, str, dict[str, Any], dict[str, int], str]] = [
    ("GPT2", TEXT, {}, {"GPT2Block": 3}, "transformer.h.0"),
    ("Llama", TEXT, {}, {"LlamaDecoderLayer": 3}, "model.layers.0"),
    ("Bert", "ForMaskedLM", {}, {"BertLayer": 3}, "bert.encoder.layer.0"),
    ("Albert", "Model", {"embedding_size": 8}, {"AlbertLayer": 1}, "encoder.albert_layer_groups.0.albert_layers.0"),
    ("T5", SEQUENCES, {}, {"T5Block": 6}, "encoder.block.0"),
    ("Bart", SEQUENCES, {}, {"BartEncoderLayer": 3, "BartDecoderLayer": 2}, "model.encoder.layers.0"),
    ("ViT", "ForImageClassification", {}, {"ViTLayer": 3}, "vit."),
    ("Swin", "Model", SWIN, {"SwinLayer": 4}, "encoder.layers.0.blocks.0"),
    ("ConvNext", "Model", {"num_stages": 3, **STAGES}, {"ConvNextLayer": 6}, "encoder.stages.0.layers.0"),
    ("ResNet", "Model", BASIC, {"ResNetBasicLayer": 6}, "encoder.stages.0.layers.0"),
    ("ResNet", "Model", {"embedding_size": 8, **STAGES}, {"ResNetBottleNeckLayer": 6}, "encoder.stages.0.layers.0"),
    ("Mixtral", TEXT, {"num_local_experts": 4}, {"MixtralDecoderLayer": 3}, "model.layers.0"),
    ("CLIP", "Model", CLIP, {"CLIPEncoderLayer": 6}, "text_model.encoder.layers.0"),
]
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], str]] = {
    **{
        next(iter(kinds)): (partial(small_model, kind, task, **options), kinds, first)
        for kind, task, options, kinds, first in TRANSFORMERS
    },
    "timm": (Vit, {"VitBlock": 4}, "blocks.0"),
    "experts": (lambda: nn.Sequential(*[Experts() for _ in range(3)]), {"Experts": 3}, "0"),
    "routed": (lambda: nn.Sequential(*[Routed() for _ in range(3)]), {"Routed": 3}, "0"),
    "unrouted": (lambda: nn.Sequential(*[Routed(5) for _ in range(3)]), {"Mlp": 18}, "0.shared"),
    "student": (Pair, {"VitBlock": 8}, "student.blocks.0"),
    "stack": (Stack, {"Block": 3}, "blocks.0"),
    "sequential": (lambda: nn.Sequential(*[Block(8) for _ in range(3)], nn.Linear(8, 1)), {"Block": 3}, "0"),
    "alternating": (Alternating, {"Experts": 3, "VitBlock": 3}, "layers.0"),
    "wide": (lambda: nn.ModuleList(Wide() for _ in range(3)), {"Wide": 3}, "0"),
    "shared": (shared, {"Block": 1}, "1"),
    "levels": (levels, {"Block": 6}, "0.0"),
    "one": (lambda: nn.ModuleList([Block(8)]), {"Block": 1}, "0"),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False),
        {"TransformerEncoderLayer": 3},
        "layers.0",
    ),
    "transformer": (
        lambda: nn.Transformer(8, 2, 2, 3, 16, batch_first=True),
        {"TransformerEncoderLayer": 2, "TransformerDecoderLayer": 3},
        "encoder.layers.0",
    ),
    "lists": (
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()) for _ in range(3)]),
        {"Sequential": 3},
        "0",
    ),
}


def rename(module: nn.Module, each: bool, seed: int = 0) -> None:
    """Give every class, or each instance, a class of a random name."""
    generator, classes = random.Random(seed), {}
    for part in module.modules():
        key = id(part) if each else type(part)
        if key not in classes:
            classes[key] = type("".join(generator.choices(string.ascii_letters, k=9)), (type(part),), {})
        part.__class__ = classes[key]


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_of_many_models(name):
    make, kinds, first = MODELS[name]
    module = make()
    blocks = repeated_blocks(module)
    assert Counter(type(block).__name__ for block in blocks.values()) == kinds
    assert next(iter(blocks)).startswith(first)
    assert all(module.get_submodule(key) is block for key, block in blocks.items())
    assert list(blocks) == [key for key, _ in module.named_modules() if key in blocks]  # in module order
    assert not any(a.startswith(f"{b}.") for a in blocks for b in blocks)  # outermost only


@pytest.mark.parametrize("each", [False, True], ids=["classes", "instances"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_blocks_under_random_class_names(name, each):
    module = MODELS[name][0]()
    expected = list(repeated_blocks(module))
    rename(module, each)
    assert not any(type(part).__name__ in ("Block", "Sequential") for part in module.modules())
    assert list(repeated_blocks(module)) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 4, 3),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4), nn.Identity()),
        lambda: nn.ReLU(),
    ],
)
def test_nothing_repeated_is_an_error(make):
    with pytest.raises(NothingToDoError, match=mentions("blocks=[ClassName]")):
        repeated_blocks(make())


def test_the_error_lists_the_children_below_a_wrapper():
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 1000), nn.ReLU(), nn.LSTM(4, 4)))
    with pytest.raises(NothingToDoError, match=mentions("0.0: Linear (4,000 parameters), 0.2: LSTM (160 parameters)")):
        repeated_blocks(module)


def test_blocks_of_named_classes_are_the_outermost_ones():
    assert list(blocks_of_class(Vit(2), ["Mlp", "VitBlock"])) == ["blocks.0", "blocks.1"]
    assert list(blocks_of_class(Vit(2), ["Mlp"])) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert list(blocks_of_class(shared(), ["Block"])) == ["1"]


def test_a_class_that_is_not_there_names_the_nearest_and_lists_all():
    with pytest.raises(NothingToDoError, match=mentions("'VitBlok'", nearest("VitBlock"), "Mlp")):
        blocks_of_class(Vit(), ["VitBlok"])
    with pytest.raises(NothingToDoError, match="'Vit'"):
        blocks_of_class(Vit(), ["Vit"])  # the root itself never matches


@given(
    depth=st.integers(2, 6),
    stem=st.integers(0, 2),
    head=st.integers(0, 2),
    wrappers=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=25)
def test_equal_blocks_are_found_in_any_surroundings(depth, stem, head, wrappers, seed):
    blocks = [Block(4) for _ in range(depth)]
    module: nn.Module = nn.Sequential(*[nn.Linear(4, 4)] * stem, *blocks, *[nn.Linear(4, 4)] * head)
    for _ in range(wrappers):
        module = nn.Sequential(nn.Linear(4, 4), module)
    rename(module, each=bool(seed % 2), seed=seed)
    assert list(repeated_blocks(module).values()) == blocks
