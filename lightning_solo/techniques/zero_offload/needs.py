"""What ZeRO-Offload needs of installed packages and of the machine: each returns in words what is missing, or None."""

from __future__ import annotations

from lightning_solo.zero import extension
from lightning_solo.zero.process import unsupported_deepspeed


def engine() -> str | None:
    """Return what is wrong with the installed DeepSpeed, or None."""
    return unsupported_deepspeed()


def disk_access() -> str | None:
    """Return what DeepSpeed's asynchronous disk access lacks here, or None."""
    return extension.what_is_missing("async_io")
