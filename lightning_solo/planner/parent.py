"""A process that ends when the one that started it does, however that ends."""

from __future__ import annotations

import ctypes
import signal
import sys


def ended_with_its_parent() -> None:
    """Let the kernel end this process when its parent ends, however that does; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
