"""How long a step takes, from the operators' costs: for the order of presets, not for a promise in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_solo.planner.device import Device
from lightning_solo.planner.tracer import Cost

FLOPS_REACHED, BANDWIDTH_REACHED = 0.70, 0.80  # shares of the peaks; set once, not fitted
KERNEL_S, LAUNCH_S = 4e-6, 10e-6  # the shortest kernel; what Python takes to launch one

KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


def step_seconds(costs: Iterable[Cost], device: Device) -> float:
    """Return the seconds that operators take one after the other: the slower of device and host.

    Each takes ``max(FLOPs / (0.70 x peak), bytes / (0.80 x bandwidth), 4 us)``, and 10 us to launch.
    """
    on_device, count = 0.0, 0
    for cost in costs:
        compute = cost.flops / (FLOPS_REACHED * _peak(device, cost.dtype)) if cost.flops else 0.0
        on_device += max(compute, cost.bytes / (BANDWIDTH_REACHED * device.memory_bandwidth), KERNEL_S)
        count += 1
    return max(on_device, count * LAUNCH_S)


def _peak(device: Device, dtype: torch.dtype) -> float:
    kind = KINDS.get(dtype, "fp32")
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    # without tensor cores for a type, its arithmetic is that of fp32
    return device.flops.get(kind) or device.flops["fp32"] or 1.0
