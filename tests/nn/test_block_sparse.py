"""Attention to chosen blocks has the numbers and gradients of a masked one, and bytes that grow with the blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import block_sparse_attention
from lightning_solo.nn.attention_kernels import attention_calls
from tests.messages import mentions

BAND = [[abs(row - column) <= 1 for column in range(4)] for row in range(4)]
FIRST_AND_OWN = [[column in (0, row) for column in range(4)] for row in range(4)]
FULL = [[True] * 4] * 4


def masked(query: Tensor, key: Tensor, value: Tensor, layout: Any, causal: bool = False, scale: Any = None) -> Tensor:
    mask = torch.as_tensor(layout)
    mask = mask.repeat_interleave(query.shape[2] // mask.shape[-2], -2)
    mask = mask.repeat_interleave(key.shape[2] // mask.shape[-1], -1)
    if causal:
        mask = mask & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    repeat = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeat, 1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def tensors(tokens: int, key_tokens: int, heads: int = 4, key_heads: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(3, heads, tokens, 4), (3, key_heads, key_tokens, 4), (3, key_heads, key_tokens, 5)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", [BAND, FIRST_AND_OWN, FULL, [BAND, FULL, FIRST_AND_OWN, BAND]])
def test_numbers_and_gradients_are_those_of_a_mask(layout, causal, key_heads):
    results = []
    for function in (block_sparse_attention, masked):
        arguments = tensors(12, 12, 4, key_heads)
        output = function(*arguments, layout, causal=causal, scale=0.7)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        results.append([output, *(tensor.grad for tensor in arguments)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_keys_may_be_of_another_length_and_the_layout_a_tensor():
    arguments, layout = tensors(6, 20), torch.tensor([[True, False, True, False], [False, True, False, False]])
    torch.testing.assert_close(block_sparse_attention(*arguments, layout), masked(*arguments, layout))


def test_fused_kernels_run_once_for_all_blocks_with_as_many_keys():
    query, key, _ = (tensor.float() for tensor in tensors(64, 64))
    with attention_calls(nn.Identity()) as calls:
        block_sparse_attention(query, key, key, BAND)  # kernels want values as wide as keys
    assert calls.kernels == {"flash": 2}  # those with two blocks of keys, and those with three


def test_arithmetic_and_bytes_grow_with_the_blocks():
    def taken(blocks: int) -> tuple[int, int]:
        layout = [[abs(row - column) <= 1 for column in range(blocks)] for row in range(blocks)]
        arguments = tensors(64 * blocks, 64 * blocks)
        with FlopCounterMode(display=False) as flops, Ledger(nn.Identity(), ()) as ledger:
            block_sparse_attention(*arguments, layout).sum().backward()
        return flops.get_total_flops(), ledger.peak_bytes

    (flops, held), (twice_flops, twice_held) = taken(16), taken(32)
    assert flops > 0
    assert twice_flops < 2.15 * flops
    assert held < twice_held < 2.15 * held


def test_it_runs_on_tensors_without_data():
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = block_sparse_attention(*[torch.empty(2, 4, 12, 8, device="cuda")] * 3, BAND, causal=True)
    assert (output.shape, output.device.type) == ((2, 4, 12, 8), "cuda")


@pytest.mark.parametrize(
    ("shapes", "layout", "causal", "words"),
    [
        ([(1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], BAND, False, ("(1, 3, 4, 8)", "divide")),
        ([(2, 4, 8)] * 3, BAND, False, ("(2, 4, 8)", "(batch, heads, tokens, width)")),
        ([(1, 2, 4, 8), (1, 2, 8, 8), (1, 2, 8, 8)], BAND, True, ("(1, 2, 8, 8)", "causal")),
        ([(1, 2, 6, 8)] * 3, BAND, False, ("4 x 4 blocks", "6", "divide")),
        ([(1, 2, 4, 8)] * 3, [BAND] * 3, False, ("(3, 4, 4)", "2 heads")),
        ([(1, 2, 4, 8)] * 3, [[1, 0], [0, 1]], False, ("int64", "bool")),
        ([(1, 2, 4, 8)] * 3, [[True], [True, False]], False, ("lengths", "each block of keys")),
        ([(1, 2, 4, 8)] * 3, [[True, True], [False, False]], False, ("block 1", "choose")),
        ([(1, 2, 4, 8)] * 3, [[False, True], [True, True]], True, ("block 0", "choose")),
    ],
)
def test_bad_input_is_named(shapes, layout, causal, words):
    with pytest.raises(ValueError, match=mentions(*words)):
        block_sparse_attention(*(torch.zeros(shape) for shape in shapes), layout, causal=causal)
