"""What each choice of kept calls takes is known from one counted batch; the solver finds the best."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn.activation_budget import Call, Calls, Options, WorkLedger, least_work, options
from lightning_solo.nn.offloading import Offloader
from lightning_solo.nn.recomputation import checkpoint_blocks, inputs_kept_in
from tests.modules import Block


class Rectified(nn.Module):
    """A block whose last operator saves its result, which the next block saves as its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.down(torch.tanh(self.up(x))))


class Repeated(nn.Module):
    """One block, called three times."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(x)))


class Skips(nn.Module):
    """Two blocks down, two up, with what went down."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rectified(16) if index % 2 else Block(16) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first[::2])
        return self.blocks[3](self.blocks[2](second).repeat(2, 1) + first)


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unequal": lambda: stack(Block(16), nn.Sequential(Block(16), Block(16)), Block(16)),
    "results are inputs": lambda: stack(*[Rectified(16) for _ in range(4)]),
    "called thrice": lambda: stack(Repeated(Block(16))),
    "skips": lambda: stack(Skips()),
}


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks: the innermost of our classes, but for a sequence, which is one block."""
    kinds = (Block, Rectified)
    named = {name: part for name, part in model.named_modules() if name and isinstance(part, (*kinds, nn.Sequential))}
    return {
        name: part
        for name, part in named.items()
        if not any(other != name and name.startswith(f"{other}.") for other in named)
    }


class Trained:
    """A model that trains on one batch, with calls of its blocks that keep their activations."""

    def __init__(self, model: nn.Module, autocast: bool = False) -> None:
        self.model, self.autocast = model, autocast
        self.calls = Calls()
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.x = torch.randn(64, 16)
        checkpoint_blocks(blocks_of(model), verify=False, calls=self.calls)
        self.step()

    def step(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(self.x).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        del loss
        self.optimizer.step()

    def counted(self) -> Options:
        ledger = WorkLedger(self.model, [self.optimizer])
        self.calls.start((), ledger)
        with ledger:
            self.step()
        found = options(ledger, self.calls)
        assert found.peak() == ledger.peak_bytes
        return found

    def peak(self, kept: Any) -> int:
        self.calls.start(kept)
        with Ledger(self.model, [self.optimizer]) as ledger:
            self.step()
        return ledger.peak_bytes


def subsets(calls: Any) -> Any:
    return chain.from_iterable(combinations(calls, count) for count in range(len(calls) + 1))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_every_choice_is_known(name, autocast):
    trained = Trained(MODELS[name](), autocast)
    choices = trained.counted()
    assert len(choices.extra) == (4 if name in ("results are inputs", "skips") else 3)
    assert all(size > 0 for size in choices.saved.values())
    peaks = {kept: trained.peak(kept) for kept in subsets(choices.extra)}
    assert len(set(peaks.values())) > 2
    # beyond what it takes: the gradient of a bias, 4 x 64 bytes; of a block called thrice each call's weights in bf16
    beyond = 4 * 64 + (3 * 2 * (2 * 16 * 64 + 64 + 16) if autocast and name == "called thrice" else 0)
    assert all(0 <= choices.peak(kept) - peak <= beyond for kept, peak in peaks.items())


def test_offloaded_inputs_stay_where_a_block_keeps_them():
    trained = Trained(MODELS["results are inputs"]())
    offloader = Offloader(torch.device("cpu"), min_bytes=1024)
    with inputs_kept_in(offloader.saving):
        trained.step()  # the buffers on the host stay
        choices = trained.counted()
        for kept in subsets(choices.extra):
            assert trained.peak(kept) <= choices.peak(kept)
        for budget in range(choices.peak(), choices.peak(choices.extra), 2048):
            assert trained.peak(choices.within(budget)) <= budget
    assert offloader.moved_bytes > 0


def test_a_call_that_backward_leaves_out_has_no_choice():
    trained = Trained(stack(Block(16), Block(16)))
    with torch.no_grad():
        trained.model[0].weight.zero_()
    step = trained.step

    def with_another_call() -> None:
        trained.model[1](trained.x)
        step()

    trained.step = with_another_call  # type: ignore[method-assign]
    assert list(trained.counted().extra) == [("1", 1), ("2", 0)]


def best(base: Tensor, extra: dict[Call, Tensor], work: dict[Call, int], budget: int) -> int:
    """Return the most work of all choices that fit."""
    fitting = [kept for kept in subsets(extra) if (sum((extra[call] for call in kept), base) <= budget).all()]
    return max(sum(work[call] for call in kept) for kept in fitting)


@pytest.mark.parametrize("seed", range(20))
def test_the_solver_finds_the_least_work(seed):
    draw = random.Random(seed)
    count = 8
    # forward of each call, then backward in the opposite order: a kept call counts from its forward to its backward
    base = torch.tensor([draw.randrange(50) for _ in range(2 * count)])
    extra, work = {}, {}
    for index in range(count):
        row = torch.zeros(2 * count, dtype=torch.int64)
        row[index : 2 * count - 1 - index] = draw.randrange(1, 40)
        extra[f"b{index}", 0], work[f"b{index}", 0] = row, draw.randrange(1, 9)
    for budget in (int(base.max()), 70, 100, 150, 400):
        kept = least_work(base, extra, work, budget)
        assert sum(work[call] for call in kept) == best(base, extra, work, budget)
        assert (sum((extra[call] for call in kept), base) <= budget).all()


def test_of_equal_blocks_the_last_are_kept():
    row = torch.tensor([5])
    equal = {(f"b{index}", 0): row for index in range(40)}
    kept = least_work(torch.tensor([0]), equal, dict.fromkeys(equal, 1), 63)
    assert sorted(kept) == [(f"b{index}", 0) for index in range(28, 40)]


def test_many_unequal_blocks_are_solved_within_a_thousandth():
    draw = random.Random(1)
    sizes = {(f"b{index}", 0): draw.randrange(10**6, 10**8) for index in range(100)}
    extra = {call: torch.tensor([size]) for call, size in sizes.items()}
    half = sum(sizes.values()) // 2
    kept = least_work(torch.tensor([0]), extra, sizes, half)  # work as bytes: the fullest is the best
    assert 0.998 * half <= sum(sizes[call] for call in kept) <= half
