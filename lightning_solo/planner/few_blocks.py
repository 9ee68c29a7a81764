"""Traces of a module with many equal blocks, each computed from traces with few blocks and checked against two more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.batch_scaling import canonical
from lightning_solo.planner.capture import EndOfTrace, Trace
from lightning_solo.planner.depth_scaling import DepthTrace, NotRepeatedError, equal_traces
from lightning_solo.planner.equal_blocks import equal_runs, look_alike, shortened
from lightning_solo.planner.fake_modules import empty_parameters
from lightning_solo.planner.notes import resolved

FEW = 4
"""Blocks of the shortest trace; the special ones at both ends of a run are among them. A ring of buffers needs more."""
LEAST = 12
"""Blocks from which several short traces take less time than a whole one."""
MOST_RUNS = 3
GROUPED = 2**20
"""Elements of the parameters, and of a group of them, that released gradients update together."""

Captured = Callable[..., Trace]
"""Returns the trace of the module that its first argument makes.

It has a further ``callback`` if one is given; ``named`` returns the name in this module of a block that a preset names.
"""


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
        self.repeated: set[str] = set()  # precisions in which the whole module's forward is known to repeat its blocks
        small = (p.numel() for p in self._module.parameters() if p.numel() < GROUPED) if self.runs else ()
        self.groups_are_small = sum(small) < GROUPED

    def make(self, lengths: list[int]) -> Any:
        """Return the module with a number of blocks in each run."""
        with shortened(self._module, self.runs, lengths):  # before the copy, which takes as long as it has blocks
            return copy.deepcopy(self._module)

    def named(self, lengths: list[int], name: str) -> str | None:
        """Return the name that a block of the whole module has in a shorter one; None if that lacks it."""
        for run, length in reversed(list(zip(self.runs, lengths, strict=True))):
            prefix = f"{run.container}." if run.container else ""
            number, *rest = name.removeprefix(prefix).split(".")
            if not name.startswith(prefix) or not number.isdecimal() or int(number) < run.first + length:
                continue
            if int(number) < run.first + run.length:
                return None
            name = prefix + ".".join([str(int(number) - run.length + length), *rest])
        return name


class BlockTraces:
    """Traces of one preset by few blocks, or by all of them where blocks don't repeat the same operators.

    Args:
        blocks: makes the module.
        make: returns the whole module.
        captured: as `Captured`, of the first micro-batch.
        alike: whether the preset treats all blocks in the same way, as far as it says.
        ring: blocks that are on the device at a time; 0 if all are.
        precision: in which the forward of the whole module is checked once; if empty, it is checked in any case.
    """

    def __init__(
        self,
        blocks: FewBlocks,
        make: Callable[[], Any],
        captured: Captured,
        *,
        alike: bool = True,
        ring: int = 0,
        precision: str = "",
    ) -> None:
        self._blocks, self._make, self._precision = blocks, make, precision
        self._few = FEW + ring
        self._more = [run.length - self._few for run in blocks.runs]
        self._names: list[str] = []  # of all blocks that are marked
        self._trace: Trace | None = None  # of the first micro-batch
        self._first = captured
        is_worth_it = alike and min(self._more, default=0) >= LEAST - FEW + 2 * ring
        depth = self._depth_trace(captured) if is_worth_it else None
        self._depths = [] if depth is None else [depth]  # of different micro-batches

    def trace(self, captured: Captured) -> Trace:
        """Return the trace of a micro-batch."""
        if not self._depths:
            return resolved(captured(self._make))
        if captured is self._first and self._trace is not None:
            return self._trace
        short = self._short(captured, [0 for _ in self._more])
        for depth in reversed(self._depths):
            with suppress(NotRepeatedError):
                return self._resolved(depth.at(self._more, short))
        own = self._depth_trace(captured, short, checked=False)  # such as one example, or host memory by both
        if own is None:
            return resolved(captured(self._make))
        self._depths.append(own)
        return self._resolved(own.at(self._more))

    def _resolved(self, whole: Trace) -> Trace:
        return resolved(replace(whole, blocks=self._names))

    def _short(self, captured: Captured, more: list[int], **options: Any) -> Trace:
        """Return the trace with ``more`` blocks than the fewest in each run."""
        lengths = [self._few + number for number in more]
        named = partial(self._blocks.named, lengths)
        return captured(partial(self._blocks.make, lengths), named=named, **options)

    def _depth_trace(
        self, captured: Captured, short: Trace | None = None, *, checked: bool = True
    ) -> DepthTrace | None:
        """Return the traces of any number of blocks; None if they can't be derived, or a check fails.

        Args:
            captured: traces a module.
            short: the trace with few blocks, if it exists.
            checked: whether the trace with two more blocks is predicted, and the forward of the whole module.
        """
        runs = range(len(self._more))
        try:
            start = self._start(captured) if checked else None
            short = short or self._short(captured, [0 for _ in runs])
            longer = [self._short(captured, [int(run == other) for other in runs]) for run in runs]
            depth = DepthTrace(short, longer)
            if start is not None:
                self._names = start.blocks
                two, whole = [2 for _ in runs], depth.at(self._more)
                if start.sizes != whole.sizes or not _begins_with(whole, start):
                    return None
                if not equal_traces(depth.at(two), self._short(captured, two)):
                    return None
                self._trace = self._resolved(whole)
                self._blocks.repeated.add(self._precision)
        except Exception:  # then a trace of all blocks says why
            return None
        return depth

    def _start(self, captured: Captured) -> Trace:
        """Return the whole module's trace until the first backward, or the first forward if that is known to repeat.

        Raises:
            NotRepeatedError: techniques treat its blocks differently.
        """
        look = _Look(self._blocks, with_forward=not self._precision or self._precision not in self._blocks.repeated)
        start = self._short(captured, self._more, callback=look)
        if not look.alike:
            raise NotRepeatedError
        return start


class _Look(Callback):
    """Looks at the blocks when training is to start, and ends the trace then or before the first backward."""

    def __init__(self, blocks: FewBlocks, *, with_forward: bool) -> None:
        self._runs, self._with_forward = blocks.runs, with_forward
        self.alike = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.alike = look_alike(pl_module, self._runs, trainer.optimizers)
        if not self.alike or not self._with_forward:
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
