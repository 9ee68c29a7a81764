"""A limit of memory is reached at the same operator each time, and what makes room is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_solo.memory.ledger import Ledger
from lightning_solo.memory.limit import EVENTS_AT_MOST, MemoryLimit
from lightning_solo.out_of_memory import is_out_of_memory
from tests.messages import mentions
from tests.modules import Stack


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def step(net: nn.Module, rows: int = 64) -> Tensor:
    loss = net(torch.ones(rows, 8)).square().sum()
    loss.backward()
    return loss.detach()


def peak(net: nn.Module) -> int:
    with Ledger(net) as ledger:
        step(net)
    net.zero_grad()
    return ledger.peak_bytes


def test_a_peak_is_just_allowed_and_a_byte_less_is_not() -> None:
    net = Stack(2)
    most = peak(net)
    with MemoryLimit(most, net) as limit:
        step(net)
    assert limit.raised == 0
    net.zero_grad()
    with MemoryLimit(most - 1, net) as limit, pytest.raises(torch.OutOfMemoryError) as caught:
        step(net)
    assert limit.raised == 1
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
def test_it_fails_at_the_same_operator_each_time(share: float) -> None:
    net = Stack(2)
    limit = int(share * peak(net))
    failed = []
    for clutter in (0, 10**6, 0):
        other = torch.ones(clutter)  # what else is in the process doesn't count
        with Operators() as operators, pytest.raises(torch.OutOfMemoryError) as caught, MemoryLimit(limit, net):
            step(net)
        failed.append((operators.count, str(caught.value)))
        net.zero_grad()
        del other
    assert failed[0] == failed[1] == failed[2]
    assert failed[0][0] > 1


def test_weights_gradients_and_states_count_from_the_start() -> None:
    layer = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    layer(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    weights_gradients_momentum = 3 * 400
    with MemoryLimit(weights_gradients_momentum + 40, layer, [optimizer]):
        torch.ones(10)
    with MemoryLimit(weights_gradients_momentum + 39, layer, [optimizer]), pytest.raises(torch.OutOfMemoryError):
        torch.ones(10)
    with MemoryLimit(40):  # not those of another module
        torch.ones(10)


def test_operators_without_allocation_are_allowed_above_the_limit() -> None:
    layer = nn.Linear(10, 10)
    with MemoryLimit(0, layer) as limit:
        with torch.no_grad():
            layer.weight.mul_(2)
        layer.weight.view(-1)
        layer.weight.grad = None
        with pytest.raises(torch.OutOfMemoryError):
            layer.weight.clone()
    assert limit.raised == 1


def test_refused_allocations_are_not_counted() -> None:
    with MemoryLimit(1000) as limit:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(251)
            assert limit.live_bytes == 0
            kept = torch.ones(250)
            with pytest.raises(torch.OutOfMemoryError):
                kept.sum()
            del kept
    assert limit.raised == 6


def test_log_of_a_long_run_is_bounded() -> None:
    with MemoryLimit("1KiB") as limit:
        x = torch.zeros(10)
        for _ in range(EVENTS_AT_MOST):
            x = x + 1
        assert len(limit.log.events) <= EVENTS_AT_MOST + 2
        with pytest.raises(torch.OutOfMemoryError, match=mentions("aten.ones", "1.00 KiB")):
            torch.ones(1000)


def test_limit_that_is_no_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="many"):
        MemoryLimit("many")
