"""Processes: one that ends with its parent, and whether one runs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path


def end_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends, for whatever reason; on Linux only.

    Args:
        parent: the parent's id; this process exits at once if that has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def is_running(pid: int | str) -> bool:
    """Return whether a process runs; one that has ended, and that its parent hasn't waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
