"""DeepSpeed's process group of one process, without launcher, port or MPI."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch._C._distributed_c10d import HashStore

from lightning_solo.errors import CapabilityError
from lightning_solo.machine import is_installed
from lightning_solo.processes import environment
from lightning_solo.zero.deepspeed_internals import forget_process_group
from lightning_solo.zero.deepspeed_patches import nothing_compiled_for_communication

# The bounds of pyproject.toml. From 0.19.8 on the caller may end a window of gradient accumulation under offloading too
# (https://github.com/deepspeedai/DeepSpeed/pull/8225). The next minor version may change private names.
SUPPORTED = ">=0.19.8,<0.20"
INSTALL = f"DS_BUILD_OPS=0 pip install 'deepspeed{SUPPORTED}'"
# DeepSpeed's engine reads these from the environment. A launcher's values would make it wait for other processes.
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Silence warnings about which the user can't do anything.

    torch warns about two functions that DeepSpeed (0.19.8) calls in every step of stage 3. Lightning warns about
    logging from several processes.
    """
    before = list(warnings.filters)
    for message, category in (
        (r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning),
        (r"It is recommended to use .self.log\(.*sync_dist=True", UserWarning),
    ):
        warnings.filterwarnings("ignore", message=message, category=category)
    ours = [entry for entry in warnings.filters if entry not in before]
    try:
        yield
    finally:
        for entry in ours:
            if entry in warnings.filters:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]


def unsupported_deepspeed() -> str | None:
    """Return why DeepSpeed can't be used (not installed, too old or untested), or None; don't import it."""
    if not is_installed("deepspeed"):
        return f"zero_offload needs the package deepspeed, which is not installed here; write: {INSTALL}"
    version = importlib.metadata.version("deepspeed")
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        return f"zero_offload needs deepspeed {SUPPORTED}, and {version} is installed; write: {INSTALL}"
    return None


def check_deepspeed() -> None:
    """Refuse a machine without DeepSpeed, or with a version that is too old or untested.

    Raises:
        CapabilityError: with the command that installs it.
    """
    if missing := unsupported_deepspeed():
        raise CapabilityError(missing)


def require_deepspeed() -> None:
    """Import DeepSpeed, and remove the environment variables that it sets.

    Raises:
        CapabilityError: as `check_deepspeed`.
    """
    check_deepspeed()
    with environment({}):
        importlib.import_module("deepspeed")


def open_process_group(backend: str) -> bool:
    """Open a process group of this process and DeepSpeed's handle on it; return False if one is open already.

    It needs no address, no port and no launcher: the store is a dictionary in this process.

    Raises:
        CapabilityError: a group of more than one process is open.
    """
    import deepspeed

    opened = not torch.distributed.is_initialized()
    if opened:
        hook = sys.excepthook
        # otherwise torch warns at each barrier that it guesses the device
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device)
        sys.excepthook = hook  # torch's prints "[rank0]:" before each line of all later tracebacks
    elif torch.distributed.get_world_size() > 1:
        raise CapabilityError(
            f"zero_offload runs in one process, but a group of {torch.distributed.get_world_size()} is open;"
            " start it without a launcher such as torchrun"
        )
    try:
        with environment(ONE_PROCESS), nothing_compiled_for_communication():
            deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    except BaseException:
        if opened:
            close_process_group()
        raise
    return opened


def close_process_group() -> None:
    """Destroy the process group and DeepSpeed's handles on it, so that the next fit can open another."""
    import deepspeed

    if torch.distributed.is_initialized():
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        else:
            torch.distributed.destroy_process_group()
    forget_process_group()


def one_process(environment_class: type) -> Any:
    """Return Lightning's environment of a one-process cluster; a launcher's variables are ignored."""
    alone = {
        "creates_processes_externally": property(lambda self: True),
        "local_rank": lambda self: 0,
        "node_rank": lambda self: 0,
        # The parent's teardown removes WORLD_SIZE from the environment.
        "teardown": lambda self: None,
        "__reduce__": lambda self: (one_process, (environment_class,)),  # pickle can't find the class in a module
    }
    return type("OneProcess", (environment_class,), alone)()


def require_device(device: torch.device, *, allow_cpu: bool) -> None:
    """Refuse a device on which DeepSpeed's engine can't run or saves no memory. An allowed CPU gives a warning.

    Raises:
        CapabilityError: the device isn't the first CUDA device, or DeepSpeed chose another kind of device.
    """
    from deepspeed.accelerator import get_accelerator

    if device.type != "cuda" and not allow_cpu:
        raise CapabilityError(
            f"zero_offload needs a CUDA device, and this run is on {device.type!r}; take the preset bf16 or another"
            " without ZeRO. To try it where it saves nothing, write strategy.allow_cpu=true"
        )
    if device.type not in ("cuda", "cpu"):
        raise CapabilityError(f"zero_offload runs on 'cuda', or with allow_cpu on 'cpu'; not on {device.type!r}")
    if device.index != 0:
        raise CapabilityError(
            f"zero_offload runs on the first device it sees, not on {device};"
            f" write CUDA_VISIBLE_DEVICES={device.index} and devices=1"
        )
    if get_accelerator().device_name() != device.type:
        raise CapabilityError(
            f"DeepSpeed has chosen {get_accelerator().device_name()!r} for this process, and the run is on"
            f" {device.type!r}; start it with DS_ACCELERATOR={device.type}"
        )
    if device.type == "cpu":
        warnings.warn(
            "zero_offload runs on the CPU (allow_cpu=True), where it saves no memory: only for tests and trials",
            stacklevel=2,
        )
