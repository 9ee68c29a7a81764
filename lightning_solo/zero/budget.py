"""Check that host, device and disk have the memory that ZeRO-Offload needs, before the engine starts."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_solo.errors import BudgetError, CapabilityError
from lightning_solo.machine import IN_MEMORY, file_system
from lightning_solo.memory.sizes import sizes_of
from lightning_solo.units import format_bytes
from lightning_solo.zero.checkpoint import Group
from lightning_solo.zero.flat import states_per_element
from lightning_solo.zero.layout import ZeroLayout, ZeroSettings, zero_layout

# For batches, Python and the libraries, which are not counted. examples/results/zero_offload_cpu.json and
# zero_host_cpu.json compare predictions with measurements.
MARGIN = 0.05

# (fp32 tensors that an optimizer keeps per parameter, temporary ones of a step). Those of torch's were measured on the
# host (examples/results/zero_host_cpu.json). An unlisted optimizer counts as AdamW.
STATES = {"SGD": (1, 1), "Adagrad": (1, 1), "RMSprop": (1, 1), "Lion": (1, 1), "DeepSpeedCPUAdagrad": (1, 0)}
STATES |= {"DeepSpeedCPUAdam": (2, 0), "DeepSpeedCPULion": (2, 0)}


def states_of(optimizer: Optimizer) -> int:
    """Return the number of fp32 tensors that an optimizer keeps per parameter.

    They are counted in a trial. DeepSpeed's optimizers, and others that the trial can't run, are looked up in a table.
    """
    known, _ = STATES.get(type(optimizer).__name__, (2, 2))
    if type(optimizer).__module__.startswith("deepspeed."):
        return known
    tried = states_per_element(optimizer)
    return known if tried is None else tried


def layout_of(
    module: nn.Module,
    groups: Sequence[Group],
    optimizer: Optimizer,
    config: Mapping[str, Any],
    *,
    precision: str,
    accumulates: bool,
    cuda: bool,
) -> ZeroLayout:
    """Return the bytes that the engine will allocate for a module, under a configuration and an optimizer."""
    _, temporaries = STATES.get(type(optimizer).__name__, (2, 2))
    if any(group.get("fused") for group in optimizer.param_groups):
        temporaries = 0
    settings = ZeroSettings.of(
        config,
        precision=precision,
        states=states_of(optimizer),
        step_temporaries=temporaries,
        accumulates=accumulates,
        cuda=cuda,
    )
    sizes = sizes_of(module)
    return zero_layout(
        [[p.numel() for p in group.parameters if p.requires_grad] for group in groups],
        settings,
        frozen=sizes.frozen,
        buffer_bytes=sizes.buffer_bytes,
    )


def check_host_budget(layout: ZeroLayout, available: int, *, resident: int = 0, one_memory: bool = False) -> None:
    """Refuse a run that needs more host memory than is available.

    Args:
        layout: from `zero_layout`.
        available: free bytes on the host, from `machine.host_memory`.
        resident: bytes of the module on the host. They are added to the available bytes, since the layout counts them
            too or the run frees them.
        one_memory: Whether device and host share their memory, as on a CPU.

    Raises:
        BudgetError: names the bytes of each part, the available bytes and the missing ones.
    """
    peak = layout.one_memory_bytes if one_memory else layout.host_bytes
    parts = {**({f"device {k}": n for k, n in layout.device.items()} if one_memory else {}), **layout.host}
    _refuse("host memory", peak, parts, available + resident, "control-group limits included")


def check_device_budget(layout: ZeroLayout, available: int) -> None:
    """Refuse a run whose model states, without activations, do not fit on the device.

    Raises:
        BudgetError: as `check_host_budget`.
    """
    _refuse("device memory", layout.device_bytes, layout.device, available, "activations come on top")


def check_disk_budget(layout: ZeroLayout, folder: str | Path) -> None:
    """Refuse a run whose swapped tensors do not fit on the disk of a folder.

    Raises:
        BudgetError: as `check_host_budget`.
        CapabilityError: as `disk_budget`.
    """
    _refuse("disk", layout.disk_bytes, layout.disk, disk_budget(folder), f"below {folder}")


def disk_budget(folder: str | Path, mounts: Path = Path("/proc/self/mounts")) -> int:
    """Return the free bytes on the disk of a folder; the folder need not exist yet.

    Raises:
        CapabilityError: the folder can't be made or written, or is in memory.
    """
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    remedy = "write strategy.nvme_path=<a folder on a local SSD that you may write>"
    if not stat.S_ISDIR(existing.stat().st_mode):
        raise CapabilityError(f"nvme_path={str(folder)!r}: {existing} is a file; {remedy}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CapabilityError(f"nvme_path={str(folder)!r}: {existing} is read-only for this user; {remedy}")
    kind = file_system(existing.resolve(), mounts)
    if kind in IN_MEMORY:
        raise CapabilityError(
            f"nvme_path={str(folder)!r} is {kind}: files there take the host memory that they should save; {remedy}"
        )
    system = os.statvfs(existing)
    return system.f_bavail * system.f_frsize


def _refuse(what: str, peak: int, parts: Mapping[str, int], available: int, note: str) -> None:
    needed = int(peak * (1 + MARGIN))
    if needed <= available:
        return
    listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in parts.items() if n)
    raise BudgetError(
        f"zero_offload needs {format_bytes(needed)} of {what}, and there are {format_bytes(available)} ({note}): "
        f"{format_bytes(needed - available)} are missing. Peak {format_bytes(peak)} and a margin of {MARGIN:.0%}; "
        f"while training: {listed or 'nothing'}",
        needed,
        available,
    )
