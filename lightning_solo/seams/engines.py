"""What Lightning's strategies for several devices have in common here, also on one device."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _get_default_store

from lightning_solo.errors import ConflictError, SoloError
from lightning_solo.machine import HOST_SHARE, host_share
from lightning_solo.processes import ending, environment
from lightning_solo.seams import patches
from lightning_solo.seams.homes import OfEitherHome

ENGINE_OF = {
    "DDPStrategy": "ddp",
    "ModelParallelStrategy": "fsdp",
    "DeepSpeedStrategy": "zero3",
}
"""Name of Lightning's strategy for several devices -> engine by which cards know it."""
GRACE_S = 10.0
"""Seconds that a process may take to end its run after the first process has ended, or after it has failed."""


def engine_of(strategy: Any) -> str:
    """Return the engine of a strategy: ours, or Lightning's own; empty for one device and for others."""
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if "ZeroOffloadStrategy" in names:
        return ""
    return next((engine for name, engine in ENGINE_OF.items() if name in names), "")


def shards_parameters(strategy: Any) -> bool:
    """Return whether parameters are each process's shards, as DTensors."""
    return engine_of(strategy) == "fsdp"


class SeveralDevices(OfEitherHome):
    """Base of the strategies `ddp`, `fsdp` and `zero3`.

    On one device the process group is of this process alone: it takes no port, and ends with the run.
    """

    _stack: ExitStack | None = None  # what ends with a run
    peers: Peers | None = None
    """The processes of the current run."""

    @property
    def is_alone(self) -> bool:
        """Whether there is one device in all."""
        this: Any = self
        return bool(this.num_processes * this.num_nodes == 1)

    def _configure_launcher(self) -> None:
        if self.is_alone:  # Lightning's launcher sets the variables of a cluster
            return
        super()._configure_launcher()  # type: ignore[misc]
        if (launcher := vars(self)["_launcher"]) is not None:  # a process that others have started has none
            launcher.launch = partial(self._launch, launcher.launch)

    def _launch(self, launch: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None and trainer.training:
            self.before_processes(trainer)
        return launch(*args, trainer=trainer, **kwargs)

    def before_processes(self, trainer: Any) -> None:
        """Refuse a fit for what Trainer and module tell before the other processes start.

        Raises:
            ConflictError: a technique doesn't run with an argument of the Trainer.
        """
        for callback in trainer.callbacks:
            if (check := getattr(callback, "before_processes", None)) is not None:
                check(trainer)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the open group."""
        return {**super().__getstate__(), "_stack": None, "peers": None}  # type: ignore[dict-item]

    def setup_environment(self) -> None:
        """Start the processes' group, and keep the order of the loaders' items."""
        self._close()
        this: Any = self
        self._stack = ExitStack()
        trainer = this.lightning_module.trainer
        alone = patches.without_distributed_sampler if self.is_alone else patches.samplers_kept_in_order
        self._stack.enter_context(alone(trainer))
        self.peers = self._stack.enter_context(Peers(this._launcher))
        self._stack.enter_context(share_of_host(this.num_processes))
        super().setup_environment()  # type: ignore[misc]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes; after the end of another, as when a checkpoint is saved then, the error names it."""
        try:
            super().barrier(name)  # type: ignore[misc]
        except RuntimeError as error:
            if self.peers is not None:
                self.peers.name_cause(error)
            raise

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
def share_of_host(processes: int) -> Iterator[None]:
    """Give this process its part of the host's memory, in a context; a rank of a sweep's job has its own already."""
    if processes == 1 or HOST_SHARE in os.environ:
        yield
    else:
        with environment({HOST_SHARE: str(host_share(processes))}):
            yield


class Peers:
    """The processes of a run. One ends within a minute of another's failure, also if it waits for others.

    A process that isn't a machine's first ends soon after the first one, for which it may wait in a collective. If
    another one ends with a failure, Lightning kills the first one; here that waits for half a minute, in which the
    first one can save. A process that fails tells the others of it by the group's store.
    """

    _runs = itertools.count()

    def __init__(self, launcher: Any = None) -> None:
        self._left, self._cleans_up = threading.Event(), threading.Event()
        self._children = getattr(launcher, "procs", [])  # Lightning's first process starts the others
        self._parent = None if os.environ.get("LOCAL_RANK", "0") == "0" else os.getppid()
        self._cause: str | None = None  # the failure of another process from which this one's follows
        self.key = f"lightning_solo/failure_of_run_{next(self._runs)}"

    def __enter__(self) -> Peers:
        if self._parent is not None:
            self._start(self._watch_parent)
        patches.kills_through(lambda kill: partial(self._kill_later, kill))
        return self

    def _kill_later(self, kill: Callable[[], None]) -> None:
        if self._left.wait(3 * GRACE_S):
            time.sleep(GRACE_S)  # in which the process ends with its error
        kill()

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._cleans_up.set()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, name="peers", daemon=True).start()

    def _watch_parent(self) -> None:
        while not self._left.wait(1.0):
            if os.getppid() != self._parent and not self._left.wait(GRACE_S):
                self.end("the first process has ended, and so does this one, which waits for it")

    def failed(self, exception: BaseException) -> None:
        """End this process soon, unless the run ends first or all processes have failed.

        If another process failed or was killed before, the message of an error of torch begins with that.
        """
        if self._left.is_set() or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return
        rank, store = torch.distributed.get_rank(), _get_default_store()
        own = first = f"rank {rank} failed first: {''.join(traceback.format_exception_only(exception)).strip()}"
        with suppress(RuntimeError):  # the process with the store has ended
            first = store.compare_set(self.key, "", own).decode()
            store.add(f"{self.key}/of/{rank}", 1)
            store.add(f"{self.key}/count", 1)
        if isinstance(exception, RuntimeError) and not isinstance(exception, SoloError):
            self._cause = first if first != own else self._ended(store, rank)
            self.name_cause(exception)
        self._start(self._end_alone, exception)
        self._start(self._count_failures, store, torch.distributed.get_world_size())

    def name_cause(self, exception: BaseException) -> None:
        """Begin an error's message with the failure of another process from which it follows, if that is known."""
        if self._cause is not None:
            exception.args = (f"{self._cause}\n{exception}",)

    def _ended(self, store: Any, rank: int) -> str | None:
        """Return which other process of this machine has ended without an error of its own, after a wait of a second.

        Its connections close a moment before it has ended.
        """
        for _ in range(10):
            if self._parent is not None and os.getppid() != self._parent:
                return "the first process has ended"
            for number, child in enumerate(self._children, 1):
                code = child.poll() or 0
                if code < 0:
                    return f"process {number} was ended by {ending(code)}"
                with suppress(RuntimeError):  # the process with the store has ended
                    if code > 0 and not store.add(f"{self.key}/of/{rank + number}", 0):  # it had no error of its own
                        return f"process {number} has ended with {ending(code)}"
            time.sleep(0.1)
        return None

    def all_fail(self) -> bool:
        """Return whether all processes fail, after a wait for the others if this one has failed."""
        return self._cleans_up.wait(GRACE_S)

    def _end_alone(self, exception: BaseException) -> None:
        if not self._cleans_up.wait(2 * GRACE_S):
            traceback.print_exception(exception)
            self.end("this process has failed, and ends, since it waits for others that haven't")

    def _count_failures(self, store: Any, processes: int) -> None:
        """Let the process clean up if the run ends or all have failed; another thread's wait holds the store's lock."""
        while not self._left.wait(GRACE_S / 10):
            with suppress(RuntimeError):
                if store.add(f"{self.key}/count", 0) == processes:
                    break
        self._cleans_up.set()

    def end(self, reason: str) -> None:
        """End this process with a message, also while its main thread waits."""
        print(reason, file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # the main thread may wait in a collective


def of_each_process(trainer: Any, value: Any) -> list[Any] | None:
    """Return the value of each process by rank, in the first process; all must call it.

    None if this process has failed, and others haven't, or have ended.
    """
    has_failed, peers = trainer.state.status == "interrupted", getattr(trainer.strategy, "peers", None)
    if has_failed and (peers is None or not peers.all_fail()):
        return None
    group = torch.distributed
    each: list[Any] | None = [None] * group.get_world_size() if group.get_rank() == 0 else None
    try:
        group.gather_object(value, each)
    except RuntimeError:
        if has_failed:
            return None
        raise
    return each or []


def largest(trainer: Any, values: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the largest of each value in a run's processes; None where no process has it. All must call it."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return dict(values)
    each: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(each, dict(values))
    return {
        name: max((one[name] for one in each if one.get(name) is not None), default=None)
        for name in dict.fromkeys(name for one in each for name in one)
    }


def agreed(value: object, what: str, remedy: str) -> None:
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
