"""What convolutions take within an operator on a CPU is what torch's profiler sees them allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_solo.planner.capture import capture
from lightning_solo.planner.convolutions import workspaces
from tests.planner.modules import Classifier

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="layouts are those of oneDNN on x86",
)


def allocated(function: Any) -> tuple[Any, int]:
    """Return a function's result and the most bytes that it held, by the profiler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with one, torch takes other kernels for filters of one by one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    torch.set_num_threads(threads)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, most


# batch, channels in and out, side, kernel, stride, groups
SHAPES = {
    "plain": (8, 32, 32, 32, 3, 1, 1),
    "more channels": (8, 16, 64, 32, 3, 1, 1),
    "fewer channels": (8, 64, 16, 32, 3, 1, 1),
    "a picture": (8, 3, 16, 64, 3, 1, 1),
    "one by one": (8, 32, 64, 16, 1, 1, 1),
    "a stride": (4, 64, 64, 32, 3, 2, 1),
    "no whole block": (8, 20, 20, 32, 3, 1, 1),
    "depthwise": (4, 96, 96, 32, 7, 1, 96),
    "groups": (4, 64, 64, 32, 3, 1, 2),
    "large weights": (2, 512, 512, 8, 3, 1, 1),
    "one small example": (1, 16, 32, 32, 3, 1, 1),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", SHAPES)
def test_workspaces_equal_the_profilers(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    batch, inputs, outputs, side, kernel, stride, groups = SHAPES[name]
    if dtype == torch.float64 and (groups > 1 or layout == torch.channels_last):
        pytest.skip("torch loops over groups, and copies")
    x = torch.randn(batch, inputs, side, side, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, dtype=dtype).to(memory_format=layout)
    rest = ([stride] * 2, [kernel // 2] * 2, [1] * 2, False, [0] * 2, groups)
    forward = (x, weight, None, *rest)
    y, most = allocated(lambda: aten.convolution(*forward))
    ours = max(workspaces(aten.convolution.default, forward, y))
    # a scratchpad of 12 KiB, and weights in whole blocks, whose size depends on the processor
    assert ours == pytest.approx(most, rel=0.05, abs=2**15)
    backward = (torch.randn_like(y), x, weight, None, *rest, [True, True, False])
    results, most = allocated(lambda: aten.convolution_backward(*backward))
    ours = max(workspaces(aten.convolution_backward.default, backward, results))
    if name == "depthwise" and layout == torch.channels_last:
        assert ours < most  # a scratchpad of three times the weights and gradients, which isn't counted
    else:  # other scratchpads are small
        assert 0.85 * most <= ours <= 1.02 * most


class UNet(nn.Module):
    """Three blocks of convolutions, one of them at half the width: (batch, 3, side, side) -> (batch, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low, self.last = (nn.Conv2d(*each, 3, padding=1) for each in ((3, 16), (16, 32), (48, 16)))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.first(x))
        low = torch.relu(self.low(nn.functional.max_pool2d(first, 2)))
        last = torch.relu(self.last(torch.cat([first, nn.functional.interpolate(low, scale_factor=2.0)], 1)))
        return self.head(last.mean((2, 3)))


@pytest.mark.long
def test_plan_of_a_u_net_is_near_the_profilers_peak() -> None:
    batch = (torch.randn(8, 3, 64, 64), torch.randint(5, (8,)))
    planned = capture(lambda: Classifier(UNet()), batch, {"precision": "32-true"}, cuda=False)
    net = UNet()
    optimizer = torch.optim.AdamW(net.parameters())

    def steps() -> None:
        for _ in range(2):
            loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    weights = sum(p.nbytes for p in net.parameters())
    most = allocated(steps)[1] + weights
    peak, where = planned.log.peak()
    assert peak == pytest.approx(most, rel=0.03)
    assert planned.log.breakdown(where)["temporaries"] > 0.1 * most


def test_workspaces_on_a_gpu_are_an_assumption() -> None:
    batch = (torch.randn(2, 3, 16, 16), torch.randint(5, (2,)))
    on_gpu = capture(lambda: Classifier(UNet()), batch, {}, cuda=True)
    assert any("cuDNN's workspaces" in text for text in on_gpu.assumptions)
    assert not any("cuDNN" in text for text in capture(lambda: Classifier(UNet()), batch, {}, cuda=False).assumptions)
