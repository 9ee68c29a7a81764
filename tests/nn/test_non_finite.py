"""The module and operator that first made a value infinite or NaN are named, also in backward; masks are not."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_solo.nn.non_finite import explain
from tests.messages import mentions

pytestmark = pytest.mark.any_device


class Part(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


def attention(x: Tensor) -> Tensor:
    """Return weights of a causal mask that is filled with -inf."""
    return (x @ x.T).masked_fill(torch.ones(len(x), len(x), device=x.device).triu(1).bool(), -math.inf).softmax(1) @ x


def explained(device: torch.device, function: Any, **options: Any) -> str | None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Part(attention), Part(function), nn.Linear(4, 1)).to(device)
    x = torch.randn(3, 4, device=device)
    return explain(net, [("x", x)], lambda: net(x).sum(), **options)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, None),
        (lambda x: (x - x).log(), "aten.log in 2"),
        (lambda x: (x - x).log() * 0, "aten.log in 2"),  # the NaN comes from the infinity
        (lambda x: -(x.abs() + 1).neg().sqrt(), "aten.sqrt in 2"),
        (lambda x: x / (x - x), "aten.div in 2"),
        (lambda x: (x + 1e30) * 1e30, "aten.mul in 2"),
        (lambda x: torch.full_like(x, -math.inf).softmax(1), "aten._softmax in 2"),  # a row without a place to look at
        (lambda x: x.float().clone().div_(0.0), "aten.div_ in 2"),
    ],
)
def test_operator_and_module_of_a_loss(device: torch.device, function: Any, words: str | None) -> None:
    found = explained(device, function)
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, None),
        (lambda x: (x.square() * 0).sqrt(), ("backward of aten.div in 2", "0.weight")),
        (lambda x: (x * 0).abs().pow(0.5), ("in 2", "0.weight")),
    ],
)
def test_operator_and_module_of_a_gradient(
    device: torch.device, function: Any, words: Sequence[str] | None, recomputed: bool
) -> None:
    part = (lambda x: checkpoint(function, x, use_reentrant=False)) if recomputed else function
    found = explained(device, part, of_gradients=True)
    assert found is None if words is None else re.match(mentions(*words), str(found))


def test_the_batch_a_parameter_or_a_buffer(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    x = torch.ones(3, 4, device=device)
    assert explain(net, [("x", x), ("graph.y", x * math.nan)], lambda: None).endswith(" holds nan in graph.y")
    net[1].running_mean = torch.full((4,), -math.inf, device=device)  # as a mask holds it
    assert explain(net, [("x", x)], lambda: None) is None
    net[1].running_mean[1] = math.nan
    assert explain(net, [("x", x)], lambda: None).startswith("the buffer 1.running_mean ")
    with torch.no_grad():
        net[0].bias[0] = math.inf
    assert explain(net, [("x", x)], lambda: None).startswith("the parameter 0.bias ")


def test_no_gradient_and_no_hook_is_left(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Part(torch.log)).to(device)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    x = torch.zeros(3, 4, device=device)
    assert explain(net, [], lambda: net(x).sum(), of_gradients=True) is not None
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert net[0].bias.grad is None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
