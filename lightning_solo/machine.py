"""What this machine has, asked without torch: packages and host memory."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def is_installed(package: str) -> bool:
    """Tell whether a package could be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a None in sys.modules: there, but not to be imported
        return False


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the host, the limit of the control group included."""
    total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        available = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, int(text)), min(available, int(text) - used)
    return total, available
