"""A user's AdamW or Adam becomes a CompactAdamW that steps alike, in the groups that come later too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.conversion import compacted
from tests.training import equal, train

WIDTH = 64  # each matrix has 4,096 elements


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def trained(kind: Any, *, convert: bool, **arguments: Any) -> list[Tensor]:
    """Return the weights after five steps of the first layer, of which two are before, and five of all."""
    module = net()
    optimizer = kind(module[0].parameters(), foreach=False, **arguments)
    train(module, optimizer, 2)
    if convert:
        optimizer = compacted(optimizer, master_bits=32, moment_bits=32)
        assert type(optimizer) is CompactAdamW
    train(module, optimizer, range(2, 5))
    optimizer.add_param_group({"params": list(module[2].parameters())})  # as one unfreezes layers; by the defaults
    train(module, optimizer, range(5, 10))
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_parity_with_the_users_own(kind: Any) -> None:
    """In fp32 bit for bit, with choices of which each moves the weights."""
    choices = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}
    plain = trained(kind, convert=False, **choices)
    ours = trained(kind, convert=True, **choices)
    assert equal(ours, plain)
    for name in choices:
        others = trained(kind, convert=False, **{key: value for key, value in choices.items() if key != name})
        assert not any(torch.equal(left, right) for left, right in zip(others, plain, strict=True)), name
    rival = torch.optim.Adam if kind is torch.optim.AdamW else torch.optim.AdamW
    others = trained(rival, convert=False, **choices)
    assert not any(torch.equal(left, right) for left, right in zip(others, plain, strict=True))
    assert not any(torch.equal(left, right) for left, right in zip(net().parameters(), plain, strict=True))
