"""The device of this machine, from torch and calibration; and a plan's assumptions about a device."""

from __future__ import annotations

from dataclasses import replace

from lightning_solo.planner.calibration import calibrated, kept
from lightning_solo.presets.devices import CPU as CPU
from lightning_solo.presets.devices import Device as Device
from lightning_solo.presets.devices import device as device
from lightning_solo.presets.devices import devices as devices
from lightning_solo.presets.devices import file_name, find
from lightning_solo.units import format_bytes

CAPABILITIES = {  # of the table's devices, to find the nearest one to a device that isn't in the table
    "t4": (7, 5),
    "a100_40gb": (8, 0),
    "a100_80gb": (8, 0),
    "rtx_3090": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "laptop_8gb": (8, 9),
    "rtx_4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "rtx_5090": (12, 0),
}


def this_device() -> Device:
    """Return this machine's CUDA device with the driver's memory, or ``cpu``; with its calibration.

    A device that is not in the table gets the speeds of the nearest one: the closest in memory among those of the
    highest compute capability up to its own; ``source`` says so.

    Raises:
        PresetError: a device's file can't be read, or lacks a field.
    """
    uncalibrated = _from_table()
    readings = kept(uncalibrated)
    return uncalibrated if readings is None else calibrated(uncalibrated, readings)


def _from_table() -> Device:
    import torch

    if not torch.cuda.is_available():
        return device(CPU)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (known := find(properties.name)) is not None:
        return replace(known, memory_bytes=properties.total_memory)
    name = file_name(properties.name)
    major, minor = properties.major, properties.minor
    nearest = _nearest_by_capability((major, minor), properties.total_memory)
    return replace(
        nearest,
        name=name,
        label=properties.name,
        memory_bytes=properties.total_memory,
        source=f"not in the table: memory from the driver, everything else as of {nearest.label}, the nearest to"
        f" compute capability {major}.{minor}; conf/solo/device/{name}.yaml would be used instead",
    )


def _nearest_by_capability(capability: tuple[int, int], memory_bytes: int) -> Device:
    known = set(CAPABILITIES.values())
    best = max((each for each in known if each <= capability), default=min(known))
    similar = [device(name) for name, each in CAPABILITIES.items() if each == best]
    return min(similar, key=lambda each: abs(each.memory_bytes - memory_bytes))


def assumed(device: Device, precision: str) -> list[str]:
    """Return a plan's assumptions about a device and a precision (Lightning's name), in words."""
    assumptions = [
        "on a CPU kernels' own buffers, except those of convolutions, and the allocator's gaps are not counted"
    ]
    if device.name != CPU:
        assumptions = [f"{format_bytes(device.context_bytes)} of CUDA context"]
    if device.calibrated is not None:
        constants = "speeds" if device.name == CPU else "speeds, CUDA context and workspace"
        assumptions.append(f"{constants} of this {device.label}, calibrated on {device.calibrated}")
    if precision.startswith("bf16") and device.flops["bf16"] is None:
        assumptions.append(
            f"{device.label} has no bf16 arithmetic: it is emulated and slow, and a run is refused there; fp16 works"
            " (preset fp16)"
        )
    return assumptions
