"""A reading of a device's memory: counters of the CUDA allocator, or of this process on a CPU."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Reading:
    """Memory counters of a device at one moment; None where it has no such counter.

    A peak counts from the last reset of the counters, by any code; ``peak_resident`` from the start of the process.
    """

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    alloc_retries: int | None = None
    resident: int | None = None
    peak_resident: int | None = None


def read(device: torch.device) -> Reading:
    """Return a reading of a CUDA device, or of this process for any other device.

    Neither synchronises nor starts CUDA: before the first allocation every counter is 0.
    """
    return _read_cuda(device) if device.type == "cuda" else _read_process()


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
    return Reading(resident=resident, peak_resident=max(resident, _peak_resident_bytes()))


def _peak_resident_bytes() -> int:
    """Return the largest resident set so far; 0 where the system has no such counter (Windows)."""
    try:
        # getrusage is the fallback, since ru_maxrss is inherited from the process that started this one
        with _STATUS.open("rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
