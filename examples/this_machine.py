"""What a measurement was taken on: hardware and versions, as they stand beside its figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform

PACKAGES = ("torch", "lightning", "deepspeed", "torchao")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, where they are installed."""
    there = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: there[name] for name in PACKAGES if name in there}}


def machine() -> str:
    """Return the hardware in words."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU"
