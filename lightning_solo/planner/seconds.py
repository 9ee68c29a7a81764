"""How long a step takes, from the operators' costs: for the order of presets, not for a promise in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_solo.planner.device import Device
from lightning_solo.planner.tracer import Cost

KERNEL_S, LAUNCH_S = 4e-6, 10e-6  # the shortest kernel; what Python takes to launch one

KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


def step_seconds(costs: Iterable[Cost], device: Device) -> float:
    """Return the seconds that operators take one after the other: the slower of device and host.

    Each takes ``max(FLOPs / speed, bytes / bandwidth, 4 us)``, and 10 us to launch. Speed and bandwidth are the
    device's peaks times the shares of them that are reached: 0.70 and 0.80, where those were not measured.
    """
    on_device, count = 0.0, 0
    bandwidth = device.bandwidth_reached * device.memory_bandwidth
    for cost in costs:
        compute = cost.flops / _speed(device, cost.dtype) if cost.flops else 0.0
        on_device += max(compute, cost.bytes / bandwidth, KERNEL_S)
        count += 1
    return max(on_device, count * LAUNCH_S)


def _speed(device: Device, dtype: torch.dtype) -> float:
    kind = KINDS.get(dtype, "fp32")
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    # without tensor cores for a type, its arithmetic is that of fp32
    kind = kind if device.flops.get(kind) else "fp32"
    return (device.flops[kind] or 1.0) * device.flops_reached[kind]
