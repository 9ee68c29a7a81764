"""Finds processes whose forward runs other modules than that of others, before they train wrong weights or hang."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from lightning_solo.errors import ConflictError, listed
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.seams.engines import Peers

STALL_S = 15.0
"""Seconds without a new module after which a process compares what it has run with the others."""
BACKWARD = "backward"


class SameModules:
    """The modules with weights that a batch's forward has run, in this process and in the others.

    An engine that gathers or reduces weights module by module waits for the same module in all processes, or takes
    another's weights. What they ran is compared before backward. If a process never gets there, since it waits in
    forward, a thread compares. Both use the group's store, since collectives may be out of step. Parts of compiled
    modules aren't watched: one process may run them without the compiler, and another with it.

    Args:
        module: whose modules are watched, with hooks.
        trainer: of the run.
        advice: what to write if processes differ.
        peers: the processes of the run.
    """

    def __init__(self, module: nn.Module, trainer: Any, advice: str, peers: Peers) -> None:
        self._module, self._trainer, self._advice, self._peers = module, trainer, advice, peers
        self._store = _get_default_store()
        self._rank, self._processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._ran: dict[str, None] = {}  # in the order in which they ran first
        self._current = self._compared = -1  # numbers of batches
        self._comparisons = 0
        self._moved = time.monotonic()
        self._left = threading.Event()
        compiled = {part for each in module.modules() if is_compiled(each) for part in each.modules()}
        parts = [
            (name, part)
            for name, part in module.named_modules()
            if name and part not in compiled and list(part.parameters(recurse=False))
        ]
        # before an engine's own hook, which waits
        self._hooks = [part.register_forward_pre_hook(self._recorder(name), prepend=True) for name, part in parts]

    def __enter__(self) -> SameModules:
        threading.Thread(target=self._watch, name="same modules", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for hook in self._hooks:
            hook.remove()

    def _batch(self) -> int:
        number: int = self._trainer.fit_loop.epoch_loop.total_batch_idx
        return number

    def _recorder(self, name: str) -> Callable[..., None]:
        def ran(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if self._module.training and (batch := self._batch()) != self._compared:  # else it is recomputed
                if batch != self._current:
                    self._ran, self._current = {}, batch
                self._ran[name] = None
                self._moved = time.monotonic()

        return ran

    def compare(self) -> None:
        """Compare a batch's modules between processes, before its first backward. All must call it.

        Raises:
            ConflictError: they differ; names modules and processes.
        """
        if self._batch() == self._compared:
            return
        names, self._compared = list(self._ran), self._batch()
        self._ran[BACKWARD] = None
        self._comparisons += 1
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        # A process that is ahead by a comparison has the other slot, and waits there.
        if len({*map(tuple, self._exchanged(f"digest {self._comparisons % 2}", digest))}) > 1:
            raise ConflictError(self._told(self._exchanged("modules", [*names, BACKWARD])))
        self._ran = {}

    def _exchanged(self, what: str, value: Any) -> list[Any]:
        """Return (batch, value) of each process in this comparison."""
        pause, latest = 1e-4, time.monotonic() + self._trainer.strategy.timeout_s
        self._set(what, [self._comparisons, self._compared, value])
        while (each := self._values(what)) is None or min(number for number, *_ in each) < self._comparisons:
            if time.monotonic() > latest or self._store.check([self._peers.key]):  # which a failure sets
                raise RuntimeError(f"not all processes have come to the backward of batch {self._compared}")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return [one[1:] for one in each]

    def _set(self, what: str, value: list[Any]) -> None:
        self._store.set(f"{self._peers.key}/{what}/{self._rank}", json.dumps(value))

    def _values(self, what: str) -> list[Any] | None:
        """Return each process's value, once all have set one."""
        keys = [f"{self._peers.key}/{what}/{rank}" for rank in range(self._processes)]
        return [json.loads(value) for value in self._store.multi_get(keys)] if self._store.check(keys) else None

    def _told(self, lists: list[tuple[int, list[str]]]) -> str:
        if len({batch for batch, _ in lists}) > 1:
            by_rank = "; ".join(f"batch {batch} on rank {rank}" for rank, (batch, _) in enumerate(lists))
            return (
                f"backward is that of different batches: {by_rank}; write a training_step that returns a loss in all"
                " processes, or None in all"
            )
        common = set.intersection(*(set(names) for _, names in lists)) | {BACKWARD}
        others = [[name for name in names if name not in common] for _, names in lists]
        if not any(others):  # the same in another order: the first that differ
            at = next(
                at for at, each in enumerate(zip(*(names for _, names in lists), strict=False)) if len({*each}) > 1
            )
            others = [names[at : at + 1] for _, names in lists]
        by_rank = "; ".join(f"rank {rank} ran {listed(names) or 'no other'}" for rank, names in enumerate(others))
        return f"forward runs other modules in some processes than in others: {by_rank}; {self._advice}"

    def _waits(self) -> bool:
        return bool(self._ran) and time.monotonic() - self._moved > STALL_S

    def _watch(self) -> None:
        first: list[Any] | None = None  # what all had set when this process began to wait
        for beat in itertools.count():
            if self._left.wait(STALL_S / 10):
                return
            if not self._waits():
                first = None
                continue
            with suppress(RuntimeError):  # the process with the store has ended
                self._set("waiting", [beat, self._current, list(self._ran)])
                each = self._values("waiting")
                first = first or each
                if (
                    each is None
                    or first is None
                    or any(now[0] == then[0] for now, then in zip(each, first, strict=True))
                ):
                    continue  # a process doesn't wait, or no longer
                lists = [one[1:] for one in each]
                # after a pause, for the others to see it
                if _differ(lists) and not self._left.wait(STALL_S / 5) and self._waits():
                    self._peers.end(self._told(lists))


def _differ(lists: list[Any]) -> bool:
    """Return whether waiting processes can't go on: not if some are only slow, and have run less of the same."""
    batches = [batch for batch, _ in lists]
    if len({*batches}) > 1:  # a process has left out the backward that another waits in
        return any(batch == min(batches) and BACKWARD in names for batch, names in lists)
    longest = max((names for _, names in lists), key=len)
    return any(longest[: len(names)] != names for _, names in lists)
