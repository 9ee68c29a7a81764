"""A reading of a device's memory: counters of the CUDA allocator, or of this process on a CPU."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Reading:
    """Memory counters of a device at one moment; None where it has no such counter.

    A peak counts from the last reset of the counters, by any code; ``peak_resident`` from the start of the process.
    ``swap`` is of this process, ``device_used`` of all processes, with CUDA's contexts.
    """

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    alloc_retries: int | None = None
    resident: int | None = None
    peak_resident: int | None = None
    swap: int | None = None
    device_used: int | None = None


def read(device: torch.device) -> Reading:
    """Return a reading of a CUDA device, or of this process for any other device.

    Neither synchronises nor starts CUDA: before the first allocation every counter is 0.
    """
    return _read_cuda(device) if device.type == "cuda" else _read_process()


def with_host(reading: Reading, device: torch.device) -> Reading:
    """Return a CUDA reading with this process's memory and the bytes that all processes use; any other as it is."""
    if device.type != "cuda":
        return reading
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    free, total = torch.cuda.mem_get_info(device) if started else (0, 0)
    host = _read_process()
    return replace(
        reading,
        resident=host.resident,
        peak_resident=host.peak_resident,
        swap=host.swap,
        device_used=total - free,
    )


def free_device_bytes(module: torch.nn.Module) -> int:
    """Return the bytes that a run of a module may use on the CUDA device: free, cached, or held by the module."""
    held = sum(t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers()) if t.is_cuda)
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() + held


def resident_bytes() -> int:
    """Return the bytes of this process's resident set."""
    try:
        with _STATM.open("rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return _peak_resident_bytes()


def _read_cuda(device: torch.device) -> Reading:
    # one call for all counters: torch.cuda.memory_allocated() and similar functions each flatten the whole dictionary
    stats = torch.cuda.memory_stats_as_nested_dict(device)

    def counter(name: str, which: str) -> int:
        return int(stats.get(name, {}).get("all", {}).get(which, 0))

    return Reading(
        allocated=counter("allocated_bytes", "current"),
        reserved=counter("reserved_bytes", "current"),
        peak_allocated=counter("allocated_bytes", "peak"),
        peak_reserved=counter("reserved_bytes", "peak"),
        alloc_retries=int(stats.get("num_alloc_retries", 0)),
    )


def _read_process() -> Reading:
    resident = resident_bytes()
    return Reading(resident=resident, peak_resident=max(resident, _peak_resident_bytes()), swap=_status("VmSwap"))


def _peak_resident_bytes() -> int:
    """Return the largest resident set so far; 0 where the system has no such counter (Windows)."""
    # getrusage is the fallback, since ru_maxrss is inherited from the process that started this one
    if (peak := _status("VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(largest) if sys.platform == "darwin" else int(largest) * 1024


def _status(name: str) -> int | None:
    """Return the bytes of a field of this process's status; None where the system has no such field."""
    try:
        with _STATUS.open("rb") as file:
            sizes = [line.split()[1] for line in file if line.startswith(f"{name}:".encode())]
    except OSError:
        return None
    return int(sizes[0]) * 1024 if sizes else None
