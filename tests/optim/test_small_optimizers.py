"""Lion, schedule-free AdamW and Muon equal their formulas, resume to the bit, and have the bytes that they say."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError, GradientError, NothingToDoError
from lightning_solo.nn.parameter_groups import parameter_groups
from lightning_solo.optim.gradient_release import StepInBackward
from lightning_solo.optim.master_weights import MasterWeights
from lightning_solo.optim.muon import MuonAdamW
from lightning_solo.optim.one_by_one import AdamW4bit, AdamW8bit, Lion
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW
from tests.messages import mentions
from tests.modules import Stack

WIDTH = 64
STEPS = 5
Make = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "lion": lambda net: Lion(net.parameters(), lr=1e-2, weight_decay=0.1),
    "muon": lambda net: MuonAdamW(parameter_groups(net, MuonAdamW), lr=1e-2),
    "schedule_free": lambda net: ScheduleFreeAdamW(net.parameters(), lr=1e-2, weight_decay=0.1),
    "adamw_8bit": lambda net: AdamW8bit(net.parameters(), lr=1e-2),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)


def stack(dtype: torch.dtype = torch.float32) -> Stack:
    torch.manual_seed(0)
    return Stack(blocks=2, width=WIDTH).to(dtype)


def losses(net: nn.Module, first: int, last: int) -> list[Tensor]:
    """Return the losses of steps, each on its own batch."""
    made = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        p = next(net.parameters())
        x = torch.randn(4, WIDTH, generator=generator).to(p.dtype)
        made.append(net(x).square().mean())
    return made


def train(net: nn.Module, optimizer: Optimizer, first: int = 0, last: int = STEPS) -> None:
    for number in range(first, last):
        optimizer.zero_grad()
        losses(net, number, number + 1)[0].backward()
        optimizer.step()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


# --- parity ---


def test_lion_is_its_formula() -> None:
    net, reference = stack(), stack()
    train(net, Lion(net.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1))
    momenta = [torch.zeros_like(p) for p in reference.parameters()]
    for number in range(STEPS):
        gradients = torch.autograd.grad(losses(reference, number, number + 1)[0], list(reference.parameters()))
        with torch.no_grad():
            for p, momentum, gradient in zip(reference.parameters(), momenta, gradients, strict=True):
                direction = torch.sign(torch.lerp(momentum, gradient, 1 - 0.9))
                p.copy_(p * (1 - 1e-2 * 0.1) - 1e-2 * direction)
                momentum.copy_(torch.lerp(momentum, gradient, 1 - 0.99))
    assert equal(net, reference)
    assert not equal(net, stack())


def test_schedule_free_keeps_the_three_sequences_of_its_formula() -> None:
    """The reference stores x, y and z; in fp64, since the optimizer stores y and z, and rounds elsewhere."""
    beta1, beta2, eps, decay = 0.9, 0.99, 1e-8, 0.1
    rates = [1e-3, 1e-2, 1e-2, 5e-3, 5e-3]
    net, reference = stack(torch.float64), stack(torch.float64)
    optimizer = ScheduleFreeAdamW(net.parameters(), betas=(beta1, beta2), eps=eps, weight_decay=decay)
    params = list(reference.parameters())
    x, z = ([p.detach().clone() for p in params] for _ in range(2))
    squares, total, largest = [torch.zeros_like(p) for p in params], 0.0, 0.0
    for number, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        train(net, optimizer, number, number + 1)
        gradients = torch.autograd.grad(losses(reference, number, number + 1)[0], params)
        rate = lr * math.sqrt(1 - beta2 ** (number + 1))
        largest = max(largest, rate)
        total += largest**2
        share = largest**2 / total
        with torch.no_grad():
            for i, (y, gradient) in enumerate(zip(params, gradients, strict=True)):
                squares[i] = beta2 * squares[i] + (1 - beta2) * gradient**2
                z[i] = z[i] - rate * (gradient / (squares[i].sqrt() + eps) + decay * y)
                x[i] = (1 - share) * x[i] + share * z[i]
                y.copy_((1 - beta1) * z[i] + beta1 * x[i])
    for p, y, average in zip(net.parameters(), params, x, strict=True):
        torch.testing.assert_close(p, y, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(y, average, atol=1e-6)
    optimizer.evaluate()
    for p, average in zip(net.parameters(), x, strict=True):
        torch.testing.assert_close(p.detach(), average, rtol=1e-12, atol=1e-12)


def test_average_comes_and_goes_without_a_changed_bit() -> None:
    plain, switched = stack(), stack()
    optimizers = [ScheduleFreeAdamW(net.parameters(), lr=1e-2) for net in (plain, switched)]
    optimizers[1].evaluate()  # before the first step there is no average
    for number in range(STEPS):
        for net, optimizer in zip((plain, switched), optimizers, strict=True):
            train(net, optimizer, number, number + 1)
        with torch.inference_mode():  # as Lightning validates
            optimizers[1].evaluate()
            optimizers[1].evaluate()
            assert equal(plain, switched) == (number == 0)  # the first average is the first weight
            optimizers[1].train()
    assert equal(plain, switched)
    optimizers[1].evaluate()
    with pytest.raises(RuntimeError, match=mentions("optimizer.train")):
        train(switched, optimizers[1])


def test_muon_is_torchs_on_matrices_and_adamw_on_the_rest() -> None:
    net, reference = stack(), stack()
    optimizer = MuonAdamW(parameter_groups(net, MuonAdamW), lr=1e-2, weight_decay=0.1)
    train(net, optimizer)
    hidden = [p for block in reference.blocks for p in block.parameters() if p.dim() == 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [reference.head.weight]}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    for number in range(STEPS):
        muon.zero_grad()
        adamw.zero_grad()
        losses(reference, number, number + 1)[0].backward()
        muon.step()
        adamw.step()
    assert equal(net, reference)
    matrices = [p for group in optimizer.param_groups if group["matrices"] for p in group["params"]]
    assert len(matrices) == 4
    assert all(set(optimizer.state[p]) == {"momentum_buffer"} for p in matrices)


@every
def test_steps_in_backward_are_those_of_a_whole_step(name: str) -> None:
    plain, released = stack(), stack()
    train(plain, OPTIMIZERS[name](plain))
    release = StepInBackward(OPTIMIZERS[name](released))
    for number in range(STEPS):
        losses(released, number, number + 1)[0].backward()
        release.step()
    assert equal(plain, released)


def test_lion_steps_master_weights() -> None:
    plain, split = stack(), stack()
    train(plain, Lion(plain.parameters(), lr=1e-2))
    optimizer = MasterWeights(Lion(split.parameters(), lr=1e-2), master_bits=24)
    train(split, optimizer)
    assert split.head.weight.dtype is torch.bfloat16
    before = stack()
    moved = [(q.float() - p).abs().mean() for p, q in zip(before.parameters(), split.parameters(), strict=True)]
    assert min(moved) > 1e-3
    assert optimizer.bytes_per_parameter == 2 + 1 + 4


# --- resuming ---


@every
def test_resumed_run_equals_the_undisturbed_one(name: str) -> None:
    whole, half = stack(), stack()
    optimizer = OPTIMIZERS[name](whole)
    train(whole, optimizer)
    optimizer = OPTIMIZERS[name](half)
    train(half, optimizer, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    rest = stack()
    rest.load_state_dict(half.state_dict())
    optimizer = OPTIMIZERS[name](rest)
    optimizer.load_state_dict(saved)
    train(rest, optimizer, 2)
    assert equal(whole, rest)


def test_file_with_the_average_as_weights_resumes_to_the_bit() -> None:
    whole, half, rest = stack(), stack(), stack()
    train(whole, ScheduleFreeAdamW(whole.parameters(), lr=1e-2))
    optimizer = ScheduleFreeAdamW(half.parameters(), lr=1e-2)
    train(half, optimizer, 0, 2)
    states = copy.deepcopy(optimizer.saved(optimizer.state_dict()))
    optimizer.evaluate()
    rest.load_state_dict(half.state_dict())
    resumed = ScheduleFreeAdamW(rest.parameters(), lr=1e-2)
    resumed.load_state_dict(states)
    resumed.train()
    train(rest, resumed, 2)
    assert equal(whole, rest)


@pytest.mark.parametrize("name", ["lion", "muon", "schedule_free"])
def test_states_of_another_optimizer_are_refused(name: str) -> None:
    net = stack()
    other = torch.optim.AdamW(net.parameters())
    train(net, other)
    optimizer = OPTIMIZERS[name](net)
    with pytest.raises(CheckpointError, match=mentions(type(optimizer).__name__, "load_from_checkpoint")):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state


# --- memory ---

COUNTED = {
    "lion": 4.0,
    "muon": 4.0,
    "schedule_free": 8.0,
    "adamw_8bit": 2.0625,  # 1 + 1, and two scales of 4 bytes for 128 elements
}


@every
def test_bytes_of_states_per_element_of_a_matrix(name: str) -> None:
    net = stack()
    optimizer = OPTIMIZERS[name](net)
    train(net, optimizer, 0, 1)
    weight = net.blocks[0].up.weight
    states = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor) and value.numel() > 1]
    assert sum(value.nbytes for value in states) == COUNTED[name] * weight.numel()


def test_four_bits() -> None:
    pytest.importorskip("torchao")
    net = stack()
    optimizer = AdamW4bit(net.parameters(), lr=1e-2)
    train(net, optimizer)
    assert sum(v.nbytes for v in optimizer.state[net.blocks[0].up.weight].values() if v.numel() > 1) == 17408
    assert not equal(net, stack())


# --- refusals ---

WRONG: list[tuple[Callable[..., Optimizer], dict[str, Any], str]] = [
    (Lion, {"lr": -1.0}, "lr=-1.0"),
    (Lion, {"betas": (0.9, 1.0)}, "betas"),
    (ScheduleFreeAdamW, {"betas": (0.0, 0.9)}, "betas"),
    (ScheduleFreeAdamW, {"eps": -1e-8}, "eps"),
    (MuonAdamW, {"weight_decay": -0.1}, "weight_decay"),
]


@pytest.mark.parametrize(("cls", "options", "named"), WRONG)
def test_values_out_of_range_are_refused(cls: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        cls([torch.zeros(2, 2, requires_grad=True)], **options)


def test_sparse_gradients_and_groups_without_matrices_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match=mentions("Lion", "sparse=False")):
        Lion(embedding.parameters()).step()
    net = stack()
    with pytest.raises(NothingToDoError, match=mentions("MuonAdamW", "parameter_groups")):
        train(net, MuonAdamW(net.parameters()))
    with pytest.raises(ValueError, match="shape"):
        MuonAdamW([{"params": [net.head.bias], "matrices": True}])
    assert len(parameters_of(MuonAdamW(net.parameters()))) == len(list(net.parameters()))
