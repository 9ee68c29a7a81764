"""Windowed attention has the numbers and gradients of a masked one, and bytes that grow with the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import sliding_window_attention
from lightning_solo.nn.attention_kernels import attention_calls
from tests.messages import mentions


def masked(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None = None) -> Tensor:
    positions = torch.arange(query.shape[2])
    distance = positions.unsqueeze(1) - positions
    mask = (distance >= 0) & (distance < window)
    repeat = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeat, 1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def tensors(tokens: int, heads: int = 2, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, n, tokens, 4, dtype=dtype, requires_grad=True) for n in (heads, key_heads, key_heads)]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "window"), [(12, 4), (13, 4), (15, 4), (9, 8), (8, 8), (5, 8), (6, 1), (1, 3)])
def test_numbers_and_gradients_are_those_of_a_mask(tokens, window, key_heads):
    results = []
    for function in (sliding_window_attention, masked):
        arguments = tensors(tokens, 4, key_heads)
        output = function(*arguments, window, scale=0.7)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        results.append([output, *(tensor.grad for tensor in arguments)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_a_fused_kernel_runs():
    with attention_calls(nn.Identity()) as calls:
        sliding_window_attention(*tensors(64, dtype=torch.float32), 16)
    assert calls.kernels == {"flash": 2}  # the first window, and all others at once


def test_beside_a_mask_each_head_has_its_keys(monkeypatch):
    calls, stock = [], F.scaled_dot_product_attention

    def seen(query: Tensor, key: Tensor, *others: Any, attn_mask: Any = None, enable_gqa: bool = False, **rest: Any):
        calls.append((attn_mask is not None, query.shape[1], key.shape[1], enable_gqa))
        return stock(query, key, *others, attn_mask=attn_mask, enable_gqa=enable_gqa, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    sliding_window_attention(*tensors(12, 4, 2), 4)
    assert calls == [(False, 4, 2, True), (True, 4, 4, False)]


def test_bytes_grow_with_the_tokens():
    def peak(function: Any, tokens: int) -> int:
        with Ledger(nn.Identity(), ()) as ledger:
            function(*tensors(tokens, dtype=torch.float32), 32).sum().backward()
        return ledger.peak_bytes

    assert peak(sliding_window_attention, 2048) < 2.1 * peak(sliding_window_attention, 1024)
    assert peak(masked, 2048) > 3.5 * peak(masked, 1024)


@pytest.mark.parametrize(
    ("shapes", "window", "words"),
    [
        ([(1, 2, 4, 8)] * 3, 0, ("window=0", "at least 1")),
        ([(1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], 2, ("(1, 3, 4, 8)", "divide")),
        ([(1, 2, 5, 8), (1, 2, 4, 8), (1, 2, 4, 8)], 2, ("(1, 2, 5, 8)", "tokens")),
        ([(2, 4, 8)] * 3, 2, ("(2, 4, 8)", "(batch, heads, tokens, width)")),
    ],
)
def test_bad_input_is_named(shapes, window, words):
    with pytest.raises(ValueError, match=mentions(*words)):
        sliding_window_attention(*(torch.zeros(shape) for shape in shapes), window)
