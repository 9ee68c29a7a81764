"""`CompactAdamW` and `StepInBackward` on the Triton kernels, run by Triton's interpreter: as on torch's operators."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import GradientError
from lightning_solo.machine import is_installed
from lightning_solo.optim import CompactAdamW, StepInBackward, kernels, triton_launches
from lightning_solo.optim.gpu_kernel import TritonKernels
from lightning_solo.optim.operator_kernels import OperatorKernels
from lightning_solo.optim.split_weights import split_parameters

if not is_installed("triton") or os.environ.get("TRITON_INTERPRET") != "1":
    reason = "needs Triton, and TRITON_INTERPRET=1 from the start: run by `make kernels`"
    pytest.skip(reason, allow_module_level=True)

CPU = torch.device("cpu")
WIDTHS = (70, 130, 50)  # weights of 9,100 and 6,500 elements, with moments in 8 bits and short last blocks
STEPS = 3
Train = Callable[[nn.Module, CompactAdamW], Any]


@pytest.fixture(autouse=True)
def exact_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch round roots as IEEE 754 requires; MKL's roots differ once in five times."""
    monkeypatch.setattr(Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    noted: list[str] = []
    real = triton_launches.functions()

    class Functions:
        def __getattr__(self, name: str) -> Any:
            noted.append(name)
            return getattr(real, name)

    monkeypatch.setattr(triton_launches, "functions", Functions)
    return noted


def trained(
    train: Train, is_triton: bool, monkeypatch: pytest.MonkeyPatch, bits: int | str = 24, **more: Any
) -> dict[str, Tensor]:
    """Return weights and states after a few steps on either kind of kernels."""
    operators = OperatorKernels(CPU, fused=False)
    chosen = TritonKernels(CPU, operators) if is_triton else operators
    monkeypatch.setattr(kernels, "kernels_on", lambda *args, **kwargs: chosen)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.Tanh(), nn.Linear(*WIDTHS[1:]), nn.LayerNorm(WIDTHS[-1]))
    corrections = split_parameters(list(net.parameters()), 24) if bits == 24 else None
    optimizer = CompactAdamW(net.parameters(), lr=1e-2, master_bits=bits, corrections=corrections, **more)
    torch.manual_seed(3)
    train(net, optimizer)
    made = {}
    for name, p in net.named_parameters():
        made |= {f"{name}.{key}": value for key, value in {"weight": p.detach(), **optimizer.state[p]}.items()}
    return made


def loss_of(net: nn.Module) -> Tensor:
    dtype = next(net.parameters()).dtype
    return (net(torch.randn(8, WIDTHS[0], dtype=dtype)) - 1).float().square().mean()


def plain(net: nn.Module, optimizer: CompactAdamW) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()


def released(**choices: Any) -> Train:
    def train(net: nn.Module, optimizer: CompactAdamW) -> None:
        release = StepInBackward(optimizer, **choices)
        for _ in range(STEPS):
            for _ in range(choices.get("accumulation", 1)):
                loss_of(net).backward()
            release.step()

    return train


EXACT: dict[str, Train] = {
    "step": plain,
    "released": released(),
    "accumulated": released(accumulation=2),
    "on the host": released(accumulation=2, buffer="host"),
    "bounded": released(accumulation=2, max_value=1e-3),
    "not clipped": released(max_norm=1e6),
}


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("bits", [24, "16-stochastic", 32], ids=str)
def test_weights_and_states_are_those_of_the_operators(
    way: str, bits: int | str, launches: list[str], monkeypatch: pytest.MonkeyPatch
):
    expected = trained(EXACT[way], False, monkeypatch, bits)
    assert not launches
    got = trained(EXACT[way], True, monkeypatch, bits)
    assert launches
    torch.testing.assert_close(got, expected, rtol=0, atol=0)  # types too


def test_clipped_by_a_norm_of_another_order_of_sums(launches: list[str], monkeypatch: pytest.MonkeyPatch):
    train = released(max_norm=0.05)
    expected, got = (trained(train, kind, monkeypatch, 32, moment_bits=32) for kind in (False, True))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    assert not torch.equal(
        got["0.weight.weight"], trained(plain, True, monkeypatch, 32, moment_bits=32)["0.weight.weight"]
    )


def test_small_parameters_share_launches(launches: list[str], monkeypatch: pytest.MonkeyPatch):
    trained(plain, True, monkeypatch)
    # one for the layout of the two large weights, one for that of the four small ones
    assert launches == ["step_many"] * 2 * STEPS


@pytest.mark.parametrize("choices", [{}, {"accumulation": 2}, {"max_norm": 1.0}], ids=str)
def test_a_gradient_that_is_not_finite_is_refused(choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    def train(net: nn.Module, optimizer: CompactAdamW) -> None:
        release = StepInBackward(optimizer, **choices)
        (loss_of(net) * float("nan")).backward()
        with pytest.raises(GradientError):
            release.step()

    trained(train, True, monkeypatch)


@pytest.mark.parametrize("count", [1, 2])
def test_a_backward_that_needs_a_weight_knows_that_it_has_changed(
    count: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
):
    chosen = TritonKernels(CPU, OperatorKernels(CPU, fused=False))
    monkeypatch.setattr(kernels, "kernels_on", lambda *args, **kwargs: chosen)
    weights = [nn.Parameter(torch.randn(64, 128)) for _ in range(count)]
    optimizer = CompactAdamW(weights, master_bits=32)
    losses = [(weight * weight).sum() for weight in weights]
    optimizer.step_many([(weight, torch.ones_like(weight)) for weight in weights], optimizer.control())
    assert launches == ["step_one" if count == 1 else "step_many"]
    for loss in losses:
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
