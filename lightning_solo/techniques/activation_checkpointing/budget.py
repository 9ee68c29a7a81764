"""Choose the block calls that each batch keeps under a memory budget, and count the batches needed for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch

from lightning_solo.data.batch_size import fits_into, shapes_of
from lightning_solo.errors import BudgetError
from lightning_solo.memory.category_peaks import counted_as_written
from lightning_solo.nn.activation_budget import Call, Calls, Options, WorkLedger, options
from lightning_solo.units import format_bytes

_PLACES = {
    (True, False): " in the first micro-batch of a window",
    (False, False): " in micro-batches within a window",
    (False, True): " in the last micro-batch of a window",
}


@dataclass
class Choice:
    """The block calls that batches up to a size keep."""

    shapes: Sequence[tuple[int, ...]]  # shapes of the counted batch's tensors
    options: Options  # all possible choices
    kept: frozenset[Call]  # block calls that aren't recomputed
    is_compiled: bool  # whether blocks are compiled, so that the ledger doesn't see their memory
    is_checked: bool  # whether a batch under this choice was counted


class BudgetedBatches:
    """Counts batches with every block recomputed, chooses the calls that fit, and checks each choice's first batch.

    A batch is counted if it is larger, in any dimension, than all batches counted so far. The first batch of an
    accumulation window, the last one and those in between are counted separately, since the gradients in memory differ.

    Args:
        budget: bytes of a step on the device, an int; or a share of the bytes that all blocks would keep, a float.
        calls: numbers the blocks' calls and records which are kept.
    """

    def __init__(self, budget: int | float, calls: Calls) -> None:
        self.budget = budget
        self.calls = calls
        self._choices: dict[Any, list[Choice]] = {}
        self._choice: Choice | None = None
        self._place: tuple[Any, Sequence[tuple[int, ...]]] = (None, ())
        self._ledger: WorkLedger | None = None
        self._outside = 0  # bytes on the device that the ledger doesn't see
        self._on = ExitStack()
        self._before: int | None = None  # the allocator's peak before a batch that the allocator checks
        self._last_count = -1
        self._refuses = True

    def begin(
        self, batch: Any, kind: Any, module: nn.Module, optimizers: Iterable[object], device: torch.device, steady: bool
    ) -> None:
        """Begin a batch; ``kind`` is its place in its window, and ``steady`` whether all optimizer states exist."""
        self.stop()
        is_share = isinstance(self.budget, float)
        self._place = (None if is_share else kind, shapes_of(batch))
        self._choice = self._choice_here()
        counted = None if device.type == "cpu" else device.type
        if self._choice is None:
            self._ledger = WorkLedger(module, optimizers, counted) if steady or is_share else None
            self.calls.start((), self._ledger)
        else:
            if not self._choice.is_checked and self._choice.is_compiled:
                self._before = None if counted is None else torch.cuda.max_memory_allocated(device)
            elif not self._choice.is_checked:
                self._ledger = WorkLedger(module, optimizers, counted)
            self.calls.start(self._choice.kept)
        if self._ledger is not None:
            self._on.enter_context(counted_as_written(self._ledger))
            allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else self._ledger.live_bytes
            self._outside = allocated - self._ledger.live_bytes

    def stop(self) -> None:
        """Stop counting, and discard the counts of this batch."""
        self._on.close()
        self._ledger = self._before = None
        self.calls.start()

    def end(self, ends_window: bool) -> tuple[str, str]:
        """End a batch; return a text to log and a warning, each empty if there is none.

        Args:
            ends_window: whether the batch was the last of its accumulation window.

        Raises:
            BudgetError: the budget is too small for a step with every block recomputed. After the first whole window
                this is a warning.
        """
        ledger, before, calls = self._ledger, self._before, copy(self.calls)
        self.stop()
        messages = "", ""
        if ledger is not None and self._choice is None:
            with no_dispatch():  # in a plan the choice computes with real tensors
                messages = self._choose(ledger, calls)
        elif ledger is not None and self._choice is not None:
            messages = "", self._check(self._choice, ledger.peak_bytes + self._outside)
        elif before is not None and self._choice is not None:
            peak = torch.cuda.max_memory_allocated()
            # an unchanged peak may be that of an earlier batch; a smaller one was reset within this batch
            if peak != before or peak <= self.budget:
                messages = "", self._check(self._choice, peak)
        if ends_window and self._choices:
            self._refuses = False
        return messages

    def _check(self, choice: Choice, peak: int) -> str:
        """Return a warning if a batch exceeded the budget, and let the next batch keep fewer calls."""
        choice.is_checked = True
        if peak <= self.budget:
            return ""
        if choice.kept and choice.is_compiled:
            choice.options.base += peak - choice.options.peak(choice.kept)
            fewer = choice.options.within(int(self.budget))
            choice.is_checked, choice.kept = fewer == choice.kept, fewer
        return (
            f"activation checkpointing: a step took {format_bytes(peak)}, above budget={self._named}, since it did more"
            f" than the counted step; the next keeps {len(choice.kept)} blocks. Write a smaller"
            " callback.activation_checkpointing.budget"
        )

    @property
    def _named(self) -> str:
        return f"{self.budget:g}" if isinstance(self.budget, float) else format_bytes(self.budget)

    def _choice_here(self) -> Choice | None:
        kind, shapes = self._place
        fitting = [choice for choice in self._choices.get(kind, ()) if fits_into(shapes, choice.shapes)]
        return min(fitting, key=lambda choice: sum(map(sum, choice.shapes)), default=None)

    def _choose(self, ledger: WorkLedger, calls: Calls) -> tuple[str, str]:
        kind, shapes = self._place
        choices = self._choices.setdefault(kind, [])
        counts = options(ledger, calls)
        counts.base += self._outside
        if isinstance(self.budget, float):
            kept = counts.share(self.budget)
        else:
            kept = counts.within(self.budget)
        least = counts.peak()
        is_too_small = isinstance(self.budget, int) and least > self.budget
        is_checked = is_too_small or isinstance(self.budget, float)
        choices.append(Choice(shapes, counts, kept, bool(calls.compiled), is_checked))
        if is_too_small:
            message = (
                f"activation checkpointing: budget={self._named}, and with every block recomputed a step takes"
                f" {format_bytes(least)}; write callback.activation_checkpointing.budget={least} or more, or take a"
                " smaller batch"
            )
            if not counts.margin:  # block inputs aren't offloaded
                message += ", or, on a GPU, write +callback=activation_offloading, which moves block inputs to the host"
            if self._refuses:
                raise BudgetError(message, needed=least, available=int(self.budget))
            return "", message
        if len(kept) == self._last_count:
            return "", ""
        self._last_count = len(kept)
        count = len(counts.extra)
        what = "blocks" if len({name for name, _ in counts.extra}) == count else "calls of blocks"
        saved = sum(counts.saved[call] for call in kept)
        return (
            f"activation checkpointing: of {count} {what} {count - len(kept)} are recomputed and {len(kept)} keep"
            f" {format_bytes(saved)} of {format_bytes(sum(counts.saved.values()))}; budget={self._named}"
            + ("" if isinstance(self.budget, float) else f", planned peak {format_bytes(counts.peak(kept))}")
            + _PLACES.get(kind, "")
        ), ""
