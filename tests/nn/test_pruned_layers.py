"""Attention of torch with fewer heads computes as torch's, with zeros in the place of the outputs of the others."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.nn.pruned_layers import PrunedAttention, keep_head_width, shrink

WIDTH, HEADS, ROWS, LENGTH = 8, 4, 3, 5
KEPT = torch.tensor([0, 1, 6, 7])  # outputs of the first and the last head


def pair(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """Return attention in which two of four heads contribute nothing, and one without these."""
    torch.manual_seed(0)
    whole, small = (nn.MultiheadAttention(WIDTH, HEADS, **options) for _ in "ab")
    for p in whole.parameters():
        nn.init.normal_(p)
    for head in (slice(2, 4), slice(4, 6)):
        whole.out_proj.weight.data[:, head] = 0
    state = whole.state_dict()
    for name, value in state.items():
        if name == "out_proj.weight":
            state[name] = value[:, KEPT]
        elif name.startswith("bias_"):
            state[name] = value[..., KEPT]
        elif name.startswith("in_proj"):
            state[name] = value[torch.cat([KEPT, KEPT + WIDTH, KEPT + 2 * WIDTH])]
        elif name.endswith("proj_weight"):
            state[name] = value[KEPT]
    sizes = {name: ([*p.shape], [*state[name].shape]) for name, p in whole.named_parameters()}
    shrink(small, {"sizes": sizes, "numbers": {"num_heads": 2}})
    small.load_state_dict(state)
    assert type(small) is PrunedAttention
    return whole, small


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"kdim": 6, "vdim": 3},
]
CALLS: list[dict[str, Any]] = [
    {},
    {"attn_mask": torch.randn(LENGTH, LENGTH)},
    {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), "padded": True},
    {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), "is_causal": True},
    {"padded": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fewer_heads_compute_as_zeros_in_the_place_of_the_others(options: dict[str, Any]) -> None:
    whole, small = pair(**options)
    for call, need_weights, batched in product(CALLS, (True, False), (True, False)):
        arguments = dict(call)
        if arguments.get("is_causal") and {"add_bias_kv", "add_zero_attn"} & options.keys():
            continue  # torch then lets no row see the added keys
        padding = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
        padding[0, 3:] = True
        if arguments.pop("padded", False):
            arguments["key_padding_mask"] = padding if batched else padding[0]

        def x(width: int, batched: bool = batched) -> Tensor:
            shape = (ROWS, LENGTH) if options.get("batch_first") else (LENGTH, ROWS)
            return torch.randn(*shape, width) if batched else torch.randn(LENGTH, width)

        q = x(WIDTH)
        inputs = (q, x(6), x(3)) if "kdim" in options else (q, q, q)
        expected, seen = whole(*inputs, need_weights=need_weights, **arguments)
        actual, weights = small(*inputs, need_weights=need_weights, average_attn_weights=False, **arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        if need_weights:
            _, seen = whole(*inputs, average_attn_weights=False, **arguments)
            torch.testing.assert_close(weights, seen[..., [0, 3], :, :], rtol=1e-4, atol=1e-5)
            _, mean = small(*inputs, **arguments)
            torch.testing.assert_close(mean, weights.mean(-3))
        else:
            assert weights is None


def test_a_mask_for_each_head_takes_the_heads_that_are_left() -> None:
    whole, small = pair(batch_first=True)
    x, mask = torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, HEADS, LENGTH, LENGTH)
    expected = whole(x, x, x, attn_mask=mask.flatten(0, 1))[0]
    actual = small(x, x, x, attn_mask=mask[:, [0, 3]].flatten(0, 1))[0]
    torch.testing.assert_close(actual, expected)


def test_dropout_is_that_of_training() -> None:
    _, small = pair(dropout=0.5)
    x = torch.randn(LENGTH, ROWS, WIDTH)
    for need_weights in (True, False):
        first, second = (small(x, x, x, need_weights=need_weights)[0] for _ in "ab")
        assert not torch.equal(first, second)
        small.eval()
        first, second = (small(x, x, x, need_weights=need_weights)[0] for _ in "ab")
        assert torch.equal(first, second)
        small.train()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_take_no_kernel_for_all_heads() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, LENGTH, WIDTH), torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, 3:] = True
    keep_head_width(net, everywhere=True)
    assert net.use_nested_tensor
    keep_head_width(net)
    assert {type(each.self_attn) for each in net.layers} == {nn.MultiheadAttention}
    with torch.no_grad():
        assert net(x, src_key_padding_mask=padding)[0, 3:].eq(0).all()  # torch's kernel has run
        for each in net.layers:
            each.self_attn.in_proj_weight.data = each.self_attn.in_proj_weight.data[:12]
            each.self_attn.in_proj_bias.data = each.self_attn.in_proj_bias.data[:12]
            each.self_attn.out_proj.weight.data = each.self_attn.out_proj.weight.data[:, :4]
            each.self_attn.num_heads = 2
        keep_head_width(net)
        actual = net(x, src_key_padding_mask=padding)
    torch.testing.assert_close(actual, net(x, src_key_padding_mask=padding))
    assert actual[0, 3:].ne(0).any()
