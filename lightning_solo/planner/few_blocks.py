"""Traces of a module with many equal blocks, each computed from traces with few blocks and checked against two more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.batch_scaling import canonical
from lightning_solo.planner.capture import EndOfTrace, Trace
from lightning_solo.planner.depth_scaling import DepthTrace, NotRepeatedError, equal_traces
from lightning_solo.planner.equal_blocks import equal_runs, look_alike, shorten
from lightning_solo.planner.fake_modules import empty_parameters

FEW = 4
"""Blocks of the shortest trace; the special ones at both ends of a run are among them."""
LEAST = 12
"""Blocks from which several short traces take less time than a whole one."""
MOST_RUNS = 3
GROUPED = 2**20
"""Elements of the parameters, and of a group of them, that released gradients update together."""

Captured = Callable[..., Trace]
"""Returns the trace of the module that its first argument makes, with a further callback if one is given."""


class FewBlocks:
    """Makes a module with any number of the equal blocks that it has.

    Args:
        make: returns the module.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        try:
            with empty_parameters():
                self._module = make()
            self.runs = equal_runs(self._module, LEAST)[:MOST_RUNS]
        except Exception:  # a constructor that computes with its weights
            self.runs = []
        small = (p.numel() for p in self._module.parameters() if p.numel() < GROUPED) if self.runs else ()
        self.groups_are_small = sum(small) < GROUPED
        self.missing = [run.length - FEW for run in self.runs]

    def make(self, more: list[int]) -> Any:
        """Return the module with ``more`` blocks than the fewest in each run."""
        module = copy.deepcopy(self._module)
        shorten(module, self.runs, [FEW + number for number in more])
        return module


class BlockTraces:
    """Traces of one preset by few blocks, or by all of them where blocks don't repeat the same operators.

    Args:
        blocks: makes the module.
        make: returns the whole module.
    """

    def __init__(self, blocks: FewBlocks, make: Callable[[], Any]) -> None:
        self._blocks, self._make = blocks, make
        self._depth: DepthTrace | None = None
        self._trace: Trace | None = None  # of the first micro-batch

    def prepare(self, captured: Captured) -> None:
        """Trace a micro-batch, from which `trace` returns it and derives others."""
        self._depth = self._depth_trace(captured)
        if self._depth is not None:
            self._trace = self._depth.at(self._blocks.missing)

    def trace(self, captured: Captured, *, first: bool) -> Trace:
        """Return the trace of a micro-batch; ``first`` is whether it is the prepared one."""
        if self._depth is None:
            return captured(self._make)
        if first and self._trace is not None:
            return self._trace
        short = captured(partial(self._blocks.make, [0] * len(self._blocks.runs)))
        try:
            return self._depth.at(self._blocks.missing, short)
        except NotRepeatedError:  # such as host memory that depends on both
            own = self._depth_trace(captured, short, checked=False)
            return captured(self._make) if own is None else own.at(self._blocks.missing)

    def _depth_trace(
        self, captured: Captured, short: Trace | None = None, *, checked: bool = True
    ) -> DepthTrace | None:
        """Return the traces of any number of blocks; None if they can't be derived, or a check fails.

        Args:
            captured: traces a module.
            short: the trace with few blocks, if it exists.
            checked: whether the trace with two more blocks is predicted, and the forward of the whole module.
        """
        runs = range(len(self._blocks.runs))
        if not runs:
            return None

        def with_more(*more: int) -> Trace:
            return captured(partial(self._blocks.make, list(more)))

        try:
            start = self._start(captured) if checked else None
            short = short or with_more(*(0 for _ in runs))
            depth = DepthTrace(short, [with_more(*(int(run == other) for other in runs)) for run in runs])
            if start is not None:
                two, whole = [2 for _ in runs], depth.at(self._blocks.missing)
                if start.sizes != whole.sizes or not _begins_with(whole, start):
                    return None
                if not equal_traces(depth.at(two), with_more(*two)):
                    return None
        except Exception:  # then a trace of all blocks says why
            return None
        return depth

    def _start(self, captured: Captured) -> Trace:
        """Return the whole module's trace until the first backward.

        Raises:
            NotRepeatedError: techniques treat its blocks differently.
        """
        look = _Look(self._blocks)
        start = captured(partial(self._blocks.make, self._blocks.missing), callback=look)
        if not look.alike:
            raise NotRepeatedError
        return start


class _Look(Callback):
    """Looks at the blocks when training is to start, and ends the trace before the first backward."""

    def __init__(self, blocks: FewBlocks) -> None:
        self._runs = blocks.runs
        self.alike = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.alike = look_alike(pl_module, self._runs, trainer.optimizers)
        if not self.alike:
            raise EndOfTrace

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        raise EndOfTrace

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        raise EndOfTrace  # of a module that runs its backward without the Trainer


def _begins_with(whole: Trace, start: Trace) -> bool:
    """Return whether a trace that ended early equals the first part of ``whole``, up to its last phase."""
    events, costs, _ = start.phases[-1]  # the rest was freed by the exception
    logs = [
        canonical(EventLog(trace.log.events[:events], trace.log.labels, trace.log.held), start.phases)
        for trace in (whole, start)
    ]
    held = [[(log.labels[storage], size) for storage, size in log.held.items()] for log in logs]
    same = held[0] == held[1] and logs[0].events == logs[1].events and whole.costs[:costs] == start.costs[:costs]
    return same and whole.phases[: len(start.phases)] == start.phases
