"""Streamed blocks of any model compute what resident ones do, in forward, backward, generation and after copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.memory.block_ring import BlockRing
from lightning_solo.nn.blocks import repeated_blocks
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.recomputation import checkpoint_blocks
from lightning_solo.nn.streaming import Streamed, start_ring, stream_blocks
from tests.conftest import long
from tests.models import small_batch, small_model
from tests.modules import Stack
from tests.training import equal

KINDS = {
    "T5": "ForConditionalGeneration", "Bert": "ForMaskedLM", "Albert": "ForMaskedLM", "Mixtral": "ForCausalLM",
    "GPT2": "ForCausalLM", "Bart": "ForConditionalGeneration",
}  # fmt: skip


def streamed(model: nn.Module, *, trains: bool = True, recomputed: bool = False) -> tuple[BlockRing, Any]:
    """Stream a model's blocks, and return the ring and the function that ends it."""
    blocks = repeated_blocks(model)
    records = stream_blocks(blocks)
    if recomputed:
        checkpoint_blocks(blocks)
    ring = start_ring(model, blocks, records, torch.device("cpu"), 2, trains)
    assert ring is not None
    return ring, lambda: (restore_forwards(blocks.values(), Streamed), ring.close())


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the loss of three batches, and the gradients of what is trained."""
    torch.manual_seed(3)
    losses = [model(**small_batch()).loss for _ in range(3)]
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        *losses,
        *torch.autograd.grad(losses[2], trained, retain_graph=True),
        *torch.autograd.grad(sum(losses), trained),
    ]


@pytest.mark.parametrize("recomputed", [False, long(True)])
@pytest.mark.parametrize("kind", ["T5", *map(long, [kind for kind in KINDS if kind != "T5"])])
def test_models_of_transformers(kind: str, recomputed: bool) -> None:
    torch.manual_seed(0)
    model = small_model(kind, KINDS[kind]).train()
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    resident = gradients(model)
    ring, end = streamed(model, recomputed=recomputed)
    found = gradients(model)  # several graphs, of which one is used twice
    assert ring.copies > (0 if kind == "Albert" else 12)
    assert equal(found, resident)
    end()
    assert equal(gradients(model), resident)


def test_blocks_are_streamed_whole_where_nothing_is_trained() -> None:
    model, x = Stack(4), torch.ones(2, 8)
    plain = copy.deepcopy(model)
    ring, end = streamed(model, trains=False)
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x))
    copied = copy.deepcopy(model)
    end()
    sizes = [p.nbytes for block in plain.blocks for p in block.parameters()]
    assert ring.host_bytes == sum(-(-size // 128) * 128 for size in sizes)
    assert torch.equal(copied(x), plain(x))
    assert equal(model, plain)


def test_a_part_that_is_used_outside_of_its_block_too_stays() -> None:
    model = Stack(3).requires_grad_(False)
    model.add_module("again", model.blocks[1].norm)
    ring, _ = streamed(model)
    assert ring.host_bytes == 3 * (4 * (32 * 8 + 32 + 8 * 32) + 128) + 2 * 2 * 128


class Sharing(nn.Module):
    """A block that makes a bias, unless it gets the first one's, which it passes on, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.linear(self.bias) if bias is None else bias
        return self.linear(x).tanh() + bias, bias


def test_a_block_is_not_loaded_for_what_it_passes_on() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(Sharing() for _ in range(5))
    for block in model:
        block.linear.requires_grad_(False)

    def gradient() -> Tensor:
        x, bias = torch.ones(2, 8), None
        for block in model:
            x, bias = block(x, bias)
        return torch.autograd.grad(x.sum(), model[0].bias)[0]

    resident = gradient()
    ring, end = streamed(model)
    assert torch.equal(gradient(), resident)
    assert ring.copies == 5 + 3  # two of five stay where the order turns
    end()


@dataclass
class Hidden:
    """What a block returns and takes."""

    x: Tensor


class Returning(nn.Module):
    """A block of frozen weights, whose hidden states are in an object."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind, self.scale, self.linear = kind, nn.Parameter(torch.full((8,), 2.0)), nn.Linear(8, 8)
        self.linear.requires_grad_(False)

    def forward(self, hidden: Any) -> Any:
        return self.kind(x=(self.linear(hidden.x) * self.scale).tanh())


@pytest.mark.parametrize("kind", [Hidden, SimpleNamespace])
def test_backward_loads_a_block_whose_output_is_in_an_object(kind: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(Returning(kind) for _ in range(5))

    def gradient() -> Tensor:
        hidden = kind(x=torch.ones(2, 8))
        for block in model:
            hidden = block(hidden)
        return torch.autograd.grad(hidden.x.sum(), model[0].scale)[0]

    resident = gradient()
    ring, end = streamed(model)
    assert torch.equal(gradient(), resident)
    assert ring.copies == 5 + 3
    end()
