"""What ZeRO-Offload needs of installed packages and of the machine."""

from __future__ import annotations

from lightning_solo.zero import extension
from lightning_solo.zero.process import check_deepspeed


def engine() -> None:
    """Refuse a missing or too old DeepSpeed.

    Raises:
        CapabilityError: names the remedy.
    """
    check_deepspeed()


def disk_access() -> str | None:
    """Return what DeepSpeed's asynchronous disk access lacks here, or None."""
    return extension.what_is_missing("async_io")
