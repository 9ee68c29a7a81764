"""The device that is here, by torch and by what was measured on it; and what a plan takes for granted of a device."""

from __future__ import annotations

from dataclasses import replace

from lightning_solo.planner.calibration import calibrated, kept
from lightning_solo.presets.devices import CPU as CPU
from lightning_solo.presets.devices import Device as Device
from lightning_solo.presets.devices import device as device
from lightning_solo.presets.devices import devices as devices
from lightning_solo.presets.devices import file_name, find
from lightning_solo.units import format_bytes

CAPABILITIES = {  # of our own files; what a device that isn't in the table resembles
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
    """Return the CUDA device here with its memory by the driver, or ``cpu`` where there is none; as calibrated.

    One that is not in the table has the speeds of the nearest that is: of the highest compute capability that isn't
    above its own, the one closest in memory; ``source`` says so.

    Raises:
        PresetError: a file of a device can't be read, or lacks a field.
    """
    on = _by_the_table()
    measured = kept(on)
    return on if measured is None else calibrated(on, measured)


def _by_the_table() -> Device:
    import torch

    if not torch.cuda.is_available():
        return device(CPU)
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (found := find(here.name)) is not None:
        return replace(found, memory_bytes=here.total_memory)
    near = _nearest_by_capability((here.major, here.minor), here.total_memory)
    return replace(
        near,
        name=file_name(here.name),
        label=here.name,
        memory_bytes=here.total_memory,
        source=f"not in the table: memory from the driver, everything else as of {near.label}, the nearest to compute "
        f"capability {here.major}.{here.minor}; conf/solo/device/{file_name(here.name)}.yaml would be used instead",
    )


def _nearest_by_capability(capability: tuple[int, int], memory_bytes: int) -> Device:
    known = sorted(set(CAPABILITIES.values()))
    best = max([it for it in known if it <= capability], default=known[0])
    alike = [device(name) for name, its in CAPABILITIES.items() if its == best]
    return min(alike, key=lambda it: abs(it.memory_bytes - memory_bytes))


def assumed(on: Device, precision: str) -> list[str]:
    """Return what a plan takes for granted of a device, in words.

    Args:
        on: the device.
        precision: of the run, by Lightning's name.
    """
    said = ["on a CPU kernels' own buffers and the allocator's gaps are not counted"]
    if on.name != CPU:
        said = [f"{format_bytes(on.context_bytes)} of CUDA context; cuDNN's workspaces not known"]
    if on.calibrated is not None:
        constants = "speeds" if on.name == CPU else "speeds, CUDA context and workspace"
        said.append(f"{constants} of this {on.label}, calibrated on {on.calibrated}")
    if precision.startswith("bf16") and on.flops["bf16"] is None:
        said.append(
            f"{on.label} has no bf16 arithmetic: emulated, slow, and a run is refused there; fp16 it has (preset fp16)"
        )
    return said
