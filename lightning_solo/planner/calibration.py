"""Measured readings of a device. They replace the table's shares and constants; a file keeps them for later plans."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import write_whole
from lightning_solo.errors import CapabilityError
from lightning_solo.machine import nvidia_driver, processor, user_cache
from lightning_solo.presets.devices import CPU, KINDS, Device, file_name
from lightning_solo.units import GiB, MiB, format_bytes

CONTEXTS = (16 * MiB, 4 * GiB)  # smallest and largest credible CUDA context, in bytes


@dataclass(frozen=True)
class Readings:
    """Measured figures of a device.

    Attributes:
        date: such as ``2026-11-22``.
        flops: floating-point operations per second of a matrix product, by kind; None where not measured.
        bandwidth: bytes per second that a copy on the device reads and writes.
        host_bandwidth: bytes per second from pinned host memory to the device.
        context_bytes: bytes that are in use outside torch's allocator after a few training steps.
        workspace_bytes: bytes that torch's allocator still has in use after all tensors are freed.
        host_bandwidth_both: bytes per second to the device and to the host, while both run; None for a CPU.
        host_memory_bandwidth: bytes per second that a copy in host memory reads and writes; None for a CPU.
    """

    date: str
    flops: Mapping[str, float | None]
    bandwidth: float
    host_bandwidth: float
    context_bytes: int
    workspace_bytes: int
    host_bandwidth_both: Sequence[float] | None = None
    host_memory_bandwidth: float | None = None

    def __post_init__(self) -> None:
        found = [*self.flops.values(), *(self.host_bandwidth_both or ()), self.host_memory_bandwidth]
        speeds = [self.bandwidth, self.host_bandwidth, *(speed for speed in found if speed is not None)]
        if not all(isinstance(speed, (int, float)) and math.isfinite(speed) and speed > 0 for speed in speeds):
            raise ValueError(f"speeds of {speeds}: each must be above 0")
        if type(self.context_bytes) is not int or type(self.workspace_bytes) is not int:
            raise ValueError(f"{self.context_bytes} and {self.workspace_bytes} bytes: each must be an integer")


def calibrated(device: Device, readings: Readings) -> Device:
    """Return the device with readings applied; its peak speeds stay those of the table.

    A kind of arithmetic that was not measured keeps its share of the peak.
    """
    reached = dict(device.flops_reached)
    for kind in KINDS:
        peak, speed = device.flops[kind], readings.flops.get(kind)
        if peak is not None and speed is not None:
            reached[kind] = speed / peak
    return replace(
        device,
        host_bandwidth=readings.host_bandwidth,
        host_bandwidth_both=readings.host_bandwidth_both or device.host_bandwidth_both,
        host_memory_bandwidth=readings.host_memory_bandwidth or device.host_memory_bandwidth,
        context_bytes=readings.context_bytes,
        workspace_bytes=readings.workspace_bytes,
        flops_reached=reached,
        bandwidth_reached=readings.bandwidth / device.memory_bandwidth,
        calibrated=readings.date,
        source=f"measured here on {readings.date}, as shares of these peaks: {device.source}",
    )


def context_of(free_before: int, free_after: int, reserved: int) -> int:
    """Return the bytes of a process's CUDA context.

    Raises:
        CapabilityError: the size isn't credible, since other programs allocated or freed memory meanwhile.
    """
    context = free_before - free_after - reserved
    if not CONTEXTS[0] <= context <= CONTEXTS[1]:
        raise CapabilityError(
            f"the CUDA context reads as {format_bytes(context)}: another program allocated or freed"
            " GPU memory meanwhile; end it, and write again: lightning-solo plan --calibrate"
        )
    return context


def place(device: Device) -> Path | None:
    """Return the file of a device's readings, by driver and torch version; None if the user has no home folder."""
    import torch

    cache = user_cache()
    if cache is None:
        return None
    if device.name == CPU:  # several machines may share a home folder; the number of threads changes all speeds
        threads = os.environ.get("OMP_NUM_THREADS") or os.cpu_count()
        name = f"{file_name(processor())}-{threads}_threads"
    else:
        name = f"{file_name(device.label)}-driver_{nvidia_driver() or 'unknown'}"
    return cache / "lightning_solo" / "devices" / f"{name}-torch_{torch.__version__}.json"


def keep(device: Device, readings: Readings) -> Path:
    """Write a device's readings and return the file.

    Raises:
        CapabilityError: there is no folder for the file, or it can't be written.
    """
    path = place(device)
    if path is None:
        raise CapabilityError("this user has no home folder to keep readings in; write XDG_CACHE_HOME=<a folder>")
    try:
        write_whole(path, f"{json.dumps({'device': device.label, **asdict(readings)}, indent=2)}\n".encode())
    except OSError as error:
        raise CapabilityError(
            f"{path} can't be written: {error.strerror}; write XDG_CACHE_HOME=<a folder of yours> before the command"
        ) from error
    return path


def kept(device: Device) -> Readings | None:
    """Return the readings of a device, or None if there is no file; warns if the file can't be read."""
    path = place(device)
    if path is None or not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        known = [field.name for field in fields(Readings) if field.name in values or field.default is MISSING]
        return Readings(**{name: values[name] for name in known})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(
            f"{path} can't be read ({type(error).__name__}: {error}), so the table's figures are used; write again:"
            " lightning-solo plan --calibrate",
            stacklevel=2,
        )
        return None
