"""Estimated seconds of an optimizer step, from its operators' costs and their schedule: good enough to rank presets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from lightning_solo.planner.device import CPU, Device
from lightning_solo.planner.timeline import (
    AWAITED,
    BESIDE,
    COMPUTE,
    TO_DEVICE,
    TO_HOST,
    Operation,
    Span,
    length,
    schedule,
)
from lightning_solo.planner.tracer import RING_BUFFERS, Cost, buffer_of
from lightning_solo.presets.devices import FP16_SUMS

KERNEL_S, LAUNCH_S = 4e-6, 10e-6  # the shortest kernel; a launch from Python

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def step_schedule(costs: Sequence[Cost], device: Device, phases: Sequence[str] = ()) -> list[Span]:
    """Return the spans of time in which the operators and copies of a step run.

    Args:
        costs: in order.
        device: the device that runs them.
        phases: the phase of each operator, used as the span's name; empty for no names.
    """
    return schedule(operations(costs, device, phases), _launch_seconds(device), _both(device))


def step_seconds(costs: Sequence[Cost], device: Device) -> float:
    """Return the seconds from the start of one step to that of the next.

    Copies to the host that a step leaves unfinished overlap with the next one.
    """
    launch_s = _launch_seconds(device)
    once, twice = (schedule(operations([*costs] * times, device), launch_s, _both(device)) for times in (1, 2))
    return length(twice) - length(once)


def operations(costs: Iterable[Cost], device: Device, phases: Sequence[str] = ()) -> list[Operation]:
    """Return operators and copies, each with the operations it waits for.

    An operator takes ``max(FLOPs / speed, bytes / bandwidth, 4 us)``, a copy its bytes over the bus' bandwidth while
    nothing is copied in the other direction. Speed and bandwidth are shares of the device's peaks: measured, or 0.70
    and 0.80. A copy to the device waits for the last copy from its buffer, and a copy to the host for the preceding
    operator; a copy of no bytes from a buffer stands for operators that still use it. An operator waits for the copies
    of buffers that were awaited since the preceding operator. Those of a second stream take turns with those of the
    first, which waits for the last of them as for a copy.
    """
    bandwidth, (copied, _) = device.bandwidth_reached * device.memory_bandwidth, device.copy_speeds()
    result: list[Operation] = []
    computed = [-1, -1]  # the last operator of each stream
    awaited: list[list[int]] = [[], []]  # copies that the next one waits for
    beside = 0
    last: dict[int, int] = {}  # slot -> the last copy to or from it
    emptied: dict[int, list[int]] = defaultdict(list)  # slot -> what the next copy to it waits for
    for index, cost in enumerate(costs):
        name, number = phases[index] if phases else "", len(result)
        slot = buffer_of(cost.slot)
        if cost.stream == BESIDE and beside:
            beside, last[slot] = 0, computed[1]
            continue
        if cost.stream == BESIDE:
            beside = 1
            awaited[1].append(computed[0])
        if cost.stream in (AWAITED, BESIDE):
            awaited[beside].append(last.get(slot, -1))
            continue
        if cost.stream == TO_HOST and not cost.bytes:
            emptied[slot].append(computed[beside])
            continue
        if cost.stream == COMPUTE:
            compute = cost.flops / _speed(device, cost) if cost.flops else 0.0
            seconds = max(compute, cost.bytes / bandwidth, KERNEL_S)
            waits, awaited[beside] = awaited[beside], []
            queue, computed[beside] = beside, number
        else:
            seconds, queue = cost.bytes / copied, _queue(cost)
            waits = emptied.pop(slot, []) if cost.stream == TO_DEVICE else [computed[beside]]
            last[slot] = number
            if cost.stream == TO_HOST:
                emptied[slot].append(number)
        result.append(Operation(cost.stream, seconds, tuple(each for each in waits if each >= 0), name, queue))
    return result


def _queue(cost: Cost) -> int:
    """Return the number of a copy's queue: staging, rings of blocks and offloading have streams of their own."""
    return 0 if 0 <= cost.slot < RING_BUFFERS else 1 if cost.slot >= RING_BUFFERS else 2


def _launch_seconds(device: Device) -> float:
    """Return the seconds in which the host launches an operator; 0 for a CPU, which computes itself."""
    return 0.0 if device.name == CPU else LAUNCH_S


def _both(device: Device) -> tuple[float, float]:
    """Return the shares of their speed that copies reach while both directions run."""
    alone, (up, down) = device.copy_speeds()
    return up / alone, down / alone


def _speed(device: Device, cost: Cost) -> float:
    kind = FP16_SUMS if cost.fp16_sums else KINDS.get(cost.dtype, "fp32")
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    # a type without arithmetic of its own runs at the speed of fp32
    kind = kind if device.flops.get(kind) else "fp32"
    return (device.flops[kind] or 1.0) * device.flops_reached[kind]
