"""A forward that is repeated meets the global state of its first run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.nn.forward_state import ForwardState


class Draws(nn.Module):
    """Depends on all of torch's global state."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        made = torch.empty(1)
        self.seen.append((self.up(x).dtype, made.dtype, made.device, float(torch.rand((), device="cpu"))))
        return torch.tanh(self.up(x).float()) * self.seen[-1][-1]


@pytest.mark.parametrize(
    ("around", "later"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), nullcontext),
        (nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)),
        (lambda: torch.device("meta"), nullcontext),
        (lambda: torch.device("cpu"), lambda: torch.device("meta")),
    ],
)
def test_the_state_of_forward_is_set_in_the_recomputation(
    around: Callable[[], AbstractContextManager[Any]], later: Callable[[], AbstractContextManager[Any]]
) -> None:
    module = Draws()
    x = torch.linspace(-1, 1, 32).view(4, 8)
    with around():
        state = ForwardState([x.device])
        module(x)
    with later():
        module(x)
        numbers = torch.get_rng_state()
        for _ in range(2):
            with state:
                module(x)
            assert torch.equal(torch.get_rng_state(), numbers)
    forward, other, *again = module.seen
    assert again == [forward, forward]
    assert other != forward


def test_the_default_dtype_is_that_of_forward_only_there() -> None:
    state = ForwardState([])
    torch.set_default_dtype(torch.float64)
    try:
        with state:
            assert torch.empty(1).dtype == torch.float32
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
