"""Parameters that no micro-batch used, on the real engine beside a plain optimizer that is given zeros for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.zero.states import read
from lightning_solo.zero.window import GradientWindow
from tests.messages import mentions
from tests.zero.engines import PLACES, arguments, batch, engine_of

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [
    pytest.mark.timeout(600),  # the first test of a machine's life builds async_io
    pytest.mark.filterwarnings("ignore:.*not used by a step"),
]


class Experts(nn.Module):
    """Two branches, of which a call uses those that it is told; large enough for the disk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 3)
        # 520 x 512 x 4 bytes are more than the 1 MiB from which on DeepSpeed has a gradient in a file of its own.
        self.second = nn.Sequential(nn.Linear(7, 512), nn.Linear(512, 520), nn.Linear(520, 3))

    def forward(self, x: Tensor, used: str) -> Tensor:
        return sum((getattr(self, name)(x) for name in used.split("+")), torch.zeros(1))


UNUSED = ("second.0.weight", "second.0.bias", "second.1.weight and 3 more")


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def train_plain(windows: list[list[str]]) -> Experts:
    module = Experts()
    optimizer = optimizer_of(module)
    for number, window in enumerate(windows):
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        for used in window:
            module(batch(number), used).square().mean().backward()
        optimizer.step()
    return module


def train(windows: list[list[str]], place: dict[str, Any], *, forget: bool = True) -> list[Tensor]:
    """Return the masters after training on the engine as the strategy steps it, or as DeepSpeed alone would."""
    module = Experts()
    accumulates = max(map(len, windows)) > 1
    with engine_of(module, optimizer_of(module), accumulates=accumulates, **place) as engine:
        window = GradientWindow(module)
        for number, micro_batches in enumerate(windows):
            for count, used in enumerate(micro_batches, 1):
                engine.backward(engine(batch(number), used).square().mean(), scale_wrt_gas=False)
                if forget:
                    window.after_backward(engine.optimizer)
                    assert window.micro_batches == count
            if forget:
                window.before_step(engine.optimizer)
                assert window.micro_batches == 0
            engine.step()
        window.remove()
        masters = read(engine.optimizer)
        return [masters[p].master.detach().clone() for p in module.parameters()]


def same(masters: list[Tensor], plain: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(masters, plain.parameters(), strict=True))


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Stage 2, stage 3, and stage 3 with gradients on disk."""
    return arguments(request.param, tmp_path)


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param([["first+second"], ["first"], ["second"], ["first+second"]], id="now and then"),
        pytest.param([["first+second"]] + 3 * [["first"]], id="once, and not again"),
        pytest.param([["first"], ["first+second"], ["first"]], id="not at first"),
    ],
)
def test_unused_parameter_has_a_gradient_of_zero(place: dict[str, Any], windows: list[list[str]]) -> None:
    plain = train_plain(windows)
    with pytest.warns(UserWarning, match=mentions(", ".join(UNUSED))):
        assert same(train(windows, place), plain)
    assert not same(train(windows, place, forget=False), plain)  # DeepSpeed steps with the last gradient once more


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param([["first+second"] * 2, ["first", "first+second"], ["first"] * 2], id="used late"),
        pytest.param([["first+second"] * 2, ["first+second", "first"], ["second", "first"]], id="used early"),
    ],
)
def test_gradients_of_an_earlier_window_are_zeroed(place: dict[str, Any], windows: list[list[str]]) -> None:
    plain = train_plain(windows)
    assert same(train(windows, place), plain)
    assert not same(train(windows, place, forget=False), plain)


def test_windows_of_different_lengths(place: dict[str, Any]) -> None:
    """A short last window, and one of a single micro-batch that uses little."""
    windows = [["first+second"] * 3, ["second"], ["first", "second", "second"], ["first"]]
    assert same(train(windows, place), train_plain(windows))


def hooks(module: nn.Module) -> list[int]:
    return [len(p._post_accumulate_grad_hooks or {}) for p in module.parameters()]


def test_its_hooks_are_removed_and_the_users_are_not() -> None:
    module, seen = Experts(), []
    module.first.weight.register_post_accumulate_grad_hook(seen.append)
    module.second[0].requires_grad_(False)
    before = hooks(module)
    window = GradientWindow(module)
    # Weight and bias of the first, and of the two of the second that are trained; the first has one of the user's.
    assert hooks(module) == [2, 1, 0, 0, 1, 1, 1, 1]
    window.remove()
    assert hooks(module) == before == [1, 0, 0, 0, 0, 0, 0, 0]
    module(batch(0), "first").sum().backward()
    assert seen == [module.first.weight]
    window.remove()
