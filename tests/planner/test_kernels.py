"""In a plan for a GPU a step of compact states costs what the Triton kernels move, in as many launches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_solo.optim import compressed_moments
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.planner.capture import capture
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.tracer import Cost
from lightning_solo.presets.compose import compose
from tests.modules import Stack, regression

WIDTH = 1024
LARGE = 2**20  # elements from which a parameter has a launch of its own


def costs_of_a_step(preset: str) -> tuple[list[Cost], list[torch.Tensor]]:
    """Return what a planned step costs, and the module's parameters."""
    net = Stack(width=WIDTH)
    batch = [torch.zeros(2, WIDTH), torch.zeros(2, 1)]
    trace = capture(lambda: regression(L, net), batch, arrange(compose(preset), {}).arguments())
    return trace.costs[trace.steps[0] : trace.steps[1]], [p.detach().bfloat16() for p in net.parameters()]


def moved(p: torch.Tensor, bits: Any = (24, 8)) -> int:
    """Return what a step reads and writes of a parameter: all but the gradient twice."""
    return 2 * (p.nbytes + bytes_of(state_layout(p, *bits))) + p.nbytes


@pytest.mark.parametrize("preset", ["compact", "compact_host"])
def test_a_large_parameter_is_one_launch_of_its_bytes(preset: str) -> None:
    costs, parameters = costs_of_a_step(preset)
    large = [p for p in parameters if p.numel() >= LARGE]
    assert large
    sizes = [cost.bytes for cost in costs if cost.dtype == torch.float32 and not cost.flops]
    for size in {moved(p) for p in large}:
        assert sizes.count(size) >= sum(moved(p) == size for p in large)


def test_small_parameters_share_launches() -> None:
    costs, parameters = costs_of_a_step("compact")
    small = [p for p in parameters if p.numel() < LARGE]
    for has_codes in (True, False):
        alike = [p for p in small if (p.numel() >= compressed_moments.LEAST) == has_codes]
        assert len(alike) > 1
        assert sum(map(moved, alike)) in [cost.bytes for cost in costs]
