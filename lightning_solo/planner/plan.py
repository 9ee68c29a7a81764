"""What a preset would take on a device: peak by category and phase, whether it fits, how long a step lasts."""

from __future__ import annotations

import os
import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_solo.errors import PlanError, PresetError, SoloError
from lightning_solo.fitting import TRUE_PRECISIONS
from lightning_solo.machine import host_memory
from lightning_solo.planner.affine import Affine, affine
from lightning_solo.planner.allocator import peak_allocated, smallest_capacity, survives
from lightning_solo.planner.answer import Plan as Plan
from lightning_solo.planner.answer import ranked as ranked
from lightning_solo.planner.beside import beside
from lightning_solo.planner.capture import Trace, capture
from lightning_solo.planner.device import Device
from lightning_solo.planner.fake import empty_parameters
from lightning_solo.planner.rules import Arrangement, arrange
from lightning_solo.planner.seconds import step_seconds
from lightning_solo.planner.tracer import PHASES, Cost
from lightning_solo.planner.zero_offload import layout_for, offload_seconds, with_layout
from lightning_solo.presets.schema import SoloConfig
from lightning_solo.units import format_bytes

LOW, HIGH = 2, 3  # micro-batches that are traced; 1 has special cases in torch
TIGHT = 0.05  # of the need: libraries that take memory unseen (cuDNN, sorting), and the context, are estimates
MOST = 2**20  # micro-batch beyond which none is looked for


@dataclass
class Planner:
    """Plans presets for one module; traces that presets share are made once.

    Args:
        make: returns the module.
        batch: a micro-batch, of tensors on the CPU; a function that returns one; None for the module's own loader.
        trainer: the user's own arguments of the Trainer.
        device: what is planned for.
        budget: bytes of it that may be taken.
        micro_batch: examples per forward; as in ``batch`` by default.
        allow: prefixes of ``_target_`` that the user trusts.
    """

    make: Callable[[], Any]
    batch: Any
    trainer: Mapping[str, Any]
    device: Device
    budget: int
    micro_batch: int | None = None
    allow: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.batch is None:
            self.batch = _own_batch(self.make)
        elif callable(self.batch):
            self.batch = self.batch()
        self._examples = examples(self.batch)
        self.micro_batch = self.micro_batch or self._examples
        self._traced: dict[str, _Traced] = {}

    @property
    def _cuda(self) -> bool:
        return self.device.name != "cpu"

    def plan(self, name: str, config: SoloConfig) -> Plan:
        """Return the plan of one preset.

        Raises:
            PlanError: the module can't be traced, in any way.
        """
        arranged = arrange(config, self.trainer, self.allow)
        traced = self._trace(arranged)
        assumptions = [*traced.trace.assumptions, *arranged.assumptions]
        if self._cuda:
            assumptions.append(
                f"{format_bytes(self.device.context_bytes)} of CUDA context; cuDNN's workspaces not known"
            )
        else:
            assumptions.append("on a CPU kernels' own buffers and the allocator's gaps are not counted")

        def at(size: int) -> Trace:
            trace = traced.at(size)
            if arranged.zero_offload is None:
                return trace
            layout = layout_for(arranged.zero_offload, arranged.precision, arranged.accumulation, trace)
            return with_layout(trace, layout)

        assert self.micro_batch is not None
        trace = at(self.micro_batch)
        peak, breakdown = self._peak(trace)
        needed = self._needed(trace)
        seconds, flops, moved = self._cost(trace, arranged)
        return Plan(
            preset=name,
            device=self.device.name,
            micro_batch=self.micro_batch,
            peak_bytes=peak,
            breakdown=breakdown,
            phases=_phase_peaks(trace),
            needed_bytes=needed,
            budget_bytes=self.budget,
            verdict=_verdict(needed, self.budget),
            host_bytes=trace.host_bytes,
            seconds_per_step=seconds,
            flops=flops,
            bytes_moved=moved,
            largest_micro_batch=self._largest(at) if traced.affine is not None else None,
            assumptions=tuple(dict.fromkeys(assumptions)),
            traced=traced.how,
            accumulation=arranged.accumulation,
        )

    # --- memory ---

    def _peak(self, trace: Trace) -> tuple[int, dict[str, int]]:
        exact, where = trace.log.peak()
        breakdown = trace.log.breakdown(where)
        if not self._cuda:
            return exact, breakdown
        peak = peak_allocated(trace.log, self.device.workspace_bytes)
        rounding = peak - exact - self.device.workspace_bytes
        return peak, {**breakdown, "workspace": self.device.workspace_bytes, "rounding": rounding}

    def _needed(self, trace: Trace) -> int:
        if not self._cuda:
            return trace.log.peak()[0]
        return smallest_capacity(trace.log, self.device.workspace_bytes) + self.device.context_bytes

    def _fits_at(self, trace: Trace) -> bool:
        room = int(self.budget / (1 + TIGHT))
        if not self._cuda:
            return trace.log.peak()[0] <= room
        room -= self.device.context_bytes
        workspace = self.device.workspace_bytes
        return peak_allocated(trace.log, workspace) <= room and survives(trace.log, room, workspace)

    def _largest(self, at: Callable[[int], Trace]) -> int:
        """Return the largest micro-batch that fits, by doubling and bisection."""
        if not self._fits_at(at(1)):
            return 0
        low, high = 1, 2
        while high <= MOST and self._fits_at(at(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits_at(at(middle)) else (low, middle)
        return low

    # --- time ---

    def _cost(self, trace: Trace, arranged: Arrangement) -> tuple[float, int, int]:
        """Return (seconds, FLOPs, bytes moved) of the second optimizer step, its micro-batches as many as there are."""
        first, last = trace.steps[-2], trace.steps[-1]
        firsts = [costs for _, costs, _ in trace.phases]
        in_step: list[Cost] = []
        of_batches: list[Cost] = []
        for index in range(first, last):
            name = trace.phases[bisect_right(firsts, index) - 1][2]
            (in_step if name == "optimizer_step" else of_batches).append(trace.costs[index])
        # the trace has a window of two at most
        windows = arranged.accumulation / min(arranged.accumulation, 2)
        batches = step_seconds(of_batches, self.device) * windows
        if arranged.zero_offload is None:
            seconds = batches + step_seconds(in_step, self.device)
        else:
            node = arranged.zero_offload
            layout = layout_for(node, arranged.precision, arranged.accumulation, trace)
            moved, update = offload_seconds(layout, node, trace, self.device, arranged.accumulation)
            seconds, in_step = max(batches, moved) + update, []
        flops = round(sum(cost.flops for cost in of_batches) * windows) + sum(cost.flops for cost in in_step)
        bytes_ = round(sum(cost.bytes for cost in of_batches) * windows) + sum(cost.bytes for cost in in_step)
        return seconds, flops, bytes_

    # --- traces ---

    def _trace(self, arranged: Arrangement) -> _Traced:
        key = repr(arranged.arguments())
        if key not in self._traced:
            self._traced[key] = self._climb(arranged)
        return self._traced[key]

    def _climb(self, arranged: Arrangement) -> _Traced:
        """Trace by the first way that works: fake tensors, those with plain attention, real steps on the CPU.

        Raises:
            PlanError: none does; says why, and what the model states alone take.
        """
        first: Exception | None = None
        for fake, attention in ((True, "fused"), (True, "math"), (False, "math")):
            try:
                if not fake:
                    self._check_real_steps()
                traced = self._both(arranged, fake=fake, attention=attention)
            except Exception as error:
                first = first or error
                continue
            if attention == "math" and fake:
                traced.trace.assumptions.append("attention keeps all scores: the fused kernels could not be planned")
            return traced
        assert first is not None
        raise PlanError(f"{_reason(first)}; {self._floor(arranged)}") from first

    def _both(self, arranged: Arrangement, *, fake: bool, attention: str) -> _Traced:
        def one(size: int) -> Trace:
            return capture(
                self.make,
                sized(self.batch, self._examples, size),
                arranged.arguments(),
                fake=fake,
                cuda=self._cuda,
                attention=attention,
            )

        how = "fake tensors" if fake else "real steps on the CPU"
        at_low, at_high = beside(lambda: one(LOW), lambda: one(HIGH)) if fake else (one(LOW), one(HIGH))
        both = affine(LOW, at_low, HIGH, at_high)
        if both is not None and (self.micro_batch in (LOW, HIGH) or not fake):
            return _Traced(at_low, both, how)
        assert self.micro_batch is not None
        trace = one(self.micro_batch)
        if both is not None and both.at(self.micro_batch).log.peak() == trace.log.peak():
            return _Traced(trace, both, how)
        if both is None:
            trace.assumptions.append("two micro-batches did not do the same: only the one given is planned")
        else:  # scores of each example against each, say
            trace.assumptions.append("what is held isn't linear in the batch: only the one given is planned")
        return _Traced(trace, None, how)

    def _check_real_steps(self) -> None:
        floor = self._states()
        if 2 * floor > host_memory()[1]:
            raise PlanError(f"real steps on the CPU need {format_bytes(2 * floor)} of host memory and more")

    def _states(self) -> int:
        with empty_parameters():
            module = self.make()
        # fp32 weight 4 + gradient 4 + two states of AdamW 8
        return sum(16 * p.numel() if p.requires_grad else 4 * p.numel() for p in module.parameters())

    def _floor(self, arranged: Arrangement) -> str:
        try:
            states = self._states()
        except Exception as error:
            return f"and the module can't be built without data either: {_reason(error)}"
        precision = str(arranged.arguments().get("precision"))
        least = states * TRUE_PRECISIONS.get(precision, 4) // 4
        return f"its model states alone, with AdamW, take {format_bytes(least)}"


@dataclass
class _Traced:
    trace: Trace
    affine: Affine | None
    how: str

    def at(self, size: int) -> Trace:
        return self.trace if self.affine is None else self.affine.at(size)


def _own_batch(make: Callable[[], Any]) -> Any:
    """Return the first batch of a module's own ``train_dataloader``.

    Raises:
        PresetError: it has none.
    """
    with empty_parameters():
        module = make()
    try:
        module.prepare_data()
        module.setup("fit")
        return next(iter(module.train_dataloader()))
    except Exception as error:
        raise PresetError(
            f"batch: none given, and {type(module).__name__}.train_dataloader() gives none"
            f" ({type(error).__name__}: {error}); write plan(module, batch), such as"
            " batch=next(iter(datamodule.train_dataloader()))"
        ) from error


def examples(batch: Any) -> int:
    """Return how many examples a batch has: the length that most of its tensors begin with.

    Raises:
        PresetError: there is no tensor in it.
    """
    lengths = [int(t.shape[0]) for t in _tensors(batch) if t.dim()]
    if not lengths:
        raise PresetError(
            f"batch={type(batch).__name__}: no tensor with a first dimension in it; give one micro-batch as"
            " training_step takes it, such as next(iter(dataloader))"
        )
    return max(set(lengths), key=lengths.count)


def sized(batch: Any, examples: int, size: int) -> Any:
    """Return the batch with another number of examples: the same ones again and again."""

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != examples:
            return tensor
        return tensor[torch.arange(size) % examples]

    return tree_map_only(Tensor, resize, batch)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _phase_peaks(trace: Trace) -> dict[str, int]:
    peaks = dict.fromkeys(PHASES, 0)
    ends = [*(first for first, _, _ in trace.phases[1:]), len(trace.log.events)]
    for (first, _, name), last in zip(trace.phases, ends, strict=True):
        peaks[name] = max(peaks[name], trace.log.peak(first, last)[0])
    return peaks


def _verdict(needed: int, budget: int) -> str:
    if needed > budget:
        return "does not fit"
    return "tight" if needed * (1 + TIGHT) > budget else "fits"


def _reason(error: BaseException) -> str:
    if isinstance(error, SoloError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)
    own = [f for f in where if not f.filename.startswith(_libraries())]
    place = f", at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}{place}"


def _libraries() -> tuple[str, ...]:
    """Return the folders of code that is nobody's training step, by their place: a user's may be called alike."""
    names = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
    files = [sys.modules[name].__file__ for name in (*names, "lightning_solo.memory") if name in sys.modules]
    return tuple(f"{Path(file).parent}{os.sep}" for file in (*files, __file__) if file is not None)
