"""What Lightning's strategies for several devices have in common here, also on one device."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from lightning_solo.errors import ConflictError
from lightning_solo.seams import patches
from lightning_solo.seams.homes import OfEitherHome

ENGINE_OF = {
    "DDPStrategy": "ddp",
    "ModelParallelStrategy": "fsdp",
    "DeepSpeedStrategy": "zero3",
}
"""Name of Lightning's strategy for several devices -> engine by which cards know it."""
GRACE_S = 10.0
"""Seconds that a process may take to end its run after the first process has ended."""


def engine_of(strategy: Any) -> str:
    """Return the engine of a strategy: ours, or Lightning's own; empty for one device and for others."""
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if "ZeroOffloadStrategy" in names:
        return ""
    return next((engine for name, engine in ENGINE_OF.items() if name in names), "")


class SeveralDevices(OfEitherHome):
    """Base of the strategies `ddp`, `fsdp` and `zero3`.

    On one device the process group is of this process alone: it takes no port, and ends with the run.
    """

    _stack: ExitStack | None = None  # what ends with a run

    @property
    def is_alone(self) -> bool:
        """Whether there is one device in all."""
        this: Any = self
        return bool(this.num_processes * this.num_nodes == 1)

    def _configure_launcher(self) -> None:
        if not self.is_alone:  # Lightning's launcher sets the variables of a cluster
            super()._configure_launcher()  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the open group."""
        return {**super().__getstate__(), "_stack": None}  # type: ignore[dict-item]

    def setup_environment(self) -> None:
        """Start the processes' group, and keep the order of the loaders' items."""
        self._close()
        this, self._stack = self, ExitStack()
        trainer = this.lightning_module.trainer  # type: ignore[attr-defined]
        alone = patches.without_distributed_sampler if self.is_alone else patches.samplers_kept_in_order
        self._stack.enter_context(alone(trainer))
        self._stack.enter_context(ends_with_its_parent())
        super().setup_environment()  # type: ignore[misc]

    def open_alone(self, backend: str) -> None:
        """Open a process group of this process, unless there is one."""
        assert self._stack is not None  # of setup_environment
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            self._stack.callback(torch.distributed.destroy_process_group)

    def teardown(self) -> None:
        """Close a process group of one process."""
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self._close()

    def _close(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()


@contextmanager
def ends_with_its_parent() -> Iterator[None]:
    """End a process that isn't a machine's first, within the context, soon after the one that started it.

    It may wait for that one in a collective. Lightning ends the first process after any other.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        yield
        return
    parent, left = os.getppid(), threading.Event()

    def watch() -> None:
        while not left.wait(1.0):
            if os.getppid() != parent and not left.wait(GRACE_S):
                print("the first process has ended, and so does this one, which waits for it", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)  # the main thread may wait in a collective

    threading.Thread(target=watch, name="ends with its parent", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def agreed(value: int | float | bool, what: str, remedy: str) -> None:
    """Require that a value is the same in all processes. All must call it.

    Raises:
        ConflictError: it differs; the message says ``what`` it is, its values by rank, and the ``remedy``.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    if any(each != values[0] for each in values):
        by_rank = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(values))
        raise ConflictError(f"{what} differs between processes: {by_rank}; {remedy}")
