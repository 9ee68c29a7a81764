"""The planner: peak memory by category and phase, verdict and step time of one preset on a device."""

from __future__ import annotations

import os
import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.errors import PlanError, SoloError
from lightning_solo.fitting import TRUE_PRECISIONS
from lightning_solo.machine import host_memory
from lightning_solo.planner.allocator import peak_allocated, smallest_capacity, survives
from lightning_solo.planner.batch_scaling import AffineTrace, affine_trace
from lightning_solo.planner.batches import examples, first_batch, sized
from lightning_solo.planner.capture import Trace, capture
from lightning_solo.planner.device import Device, assumed
from lightning_solo.planner.fake_modules import empty_parameters
from lightning_solo.planner.forks import run_in_forks
from lightning_solo.planner.plan import TIGHT, Plan, verdict_of
from lightning_solo.planner.rules import WINDOW, Arrangement, arrange
from lightning_solo.planner.step_time import step_schedule, step_seconds
from lightning_solo.planner.timeline import COMPUTE, Span, condensed
from lightning_solo.planner.tracer import PHASES, Cost
from lightning_solo.planner.zero_offload import layout_for, offload_seconds, with_layout
from lightning_solo.presets.schema import SoloConfig
from lightning_solo.units import format_bytes

SMALL = (2, 3, 4)  # micro-batches that are traced beside the given one; 1 has special cases in torch
UNLIKE = "two micro-batches did not do the same: only the one given is planned"
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
            self.batch = first_batch(self.make)
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
        assumptions = [
            *traced.trace.assumptions,
            *arranged.assumptions,
            *assumed(self.device, arranged.precision),
        ]

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
        seconds, flops, moved, timeline = self._cost(trace, arranged)
        return Plan(
            preset=name,
            device=self.device.name,
            micro_batch=self.micro_batch,
            peak_bytes=peak,
            breakdown=breakdown,
            phases=_phase_peaks(trace),
            needed_bytes=needed,
            budget_bytes=self.budget,
            verdict=verdict_of(needed, self.budget),
            host_bytes=trace.host_bytes,
            seconds_per_step=seconds,
            flops=flops,
            bytes_moved=moved,
            largest_micro_batch=self._largest(at) if traced.affine is not None else None,
            assumptions=tuple(dict.fromkeys(assumptions)),
            traced=traced.how,
            accumulation=arranged.accumulation,
            timeline=tuple(timeline),
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

    def _cost(self, trace: Trace, arranged: Arrangement) -> tuple[float, int, int, list[Span]]:
        """Return (seconds, FLOPs, bytes moved, schedule) of the second optimizer step with all its micro-batches."""
        first, last = trace.steps[-2], trace.steps[-1]
        firsts = [costs for _, costs, _ in trace.phases]
        phases = [trace.phases[bisect_right(firsts, index) - 1][2] for index in range(first, last)]
        costs = trace.costs[first:last]
        # the trace has a window of two at most
        windows = arranged.accumulation / min(arranged.accumulation, WINDOW)
        of_batches = [cost for cost, phase in zip(costs, phases, strict=True) if phase != "optimizer_step"]
        in_step = [cost for cost, phase in zip(costs, phases, strict=True) if phase == "optimizer_step"]
        if arranged.zero_offload is None:
            seconds = step_seconds(costs, self.device)
            if windows > 1:
                seconds += (windows - 1) * step_seconds(of_batches, self.device)
        else:
            node = arranged.zero_offload
            layout = layout_for(node, arranged.precision, arranged.accumulation, trace)
            moved, update = offload_seconds(layout, node, trace, self.device, arranged.accumulation)
            seconds, in_step = max(windows * step_seconds(of_batches, self.device), moved) + update, []
        flops = round(sum(cost.flops for cost in of_batches) * windows) + sum(cost.flops for cost in in_step)
        bytes_ = round(_moved(of_batches) * windows) + _moved(in_step)
        overlaps = any(cost.stream != COMPUTE for cost in costs)
        return seconds, flops, bytes_, condensed(step_schedule(costs, self.device, phases)) if overlaps else []

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
                traced = self._sizes(arranged, fake=fake, attention=attention)
            except Exception as error:
                first = first or error
                continue
            if attention == "math" and fake:
                traced.trace.assumptions.append("attention keeps all scores: the fused kernels could not be planned")
            return traced
        assert first is not None
        raise PlanError(f"{_reason(first)}; {self._floor(arranged)}") from first

    def _sizes(self, arranged: Arrangement, *, fake: bool, attention: str) -> _Traced:
        """Trace the given micro-batch and small ones, and draw a line through two of them where one can be drawn."""

        def one(size: int) -> Trace:
            return capture(
                self.make,
                sized(self.batch, self._examples, size),
                arranged.arguments(),
                fake=fake,
                cuda=self._cuda,
                attention=attention,
            )

        assert self.micro_batch is not None
        return (_without_data if fake else _by_real_steps)(one, self.micro_batch)

    def _check_real_steps(self) -> None:
        floor = self._states()
        if 2 * floor > host_memory()[1]:
            raise PlanError(f"real steps on the CPU need {format_bytes(2 * floor)} of host memory and more")

    def _states(self) -> int:
        try:
            with empty_parameters():
                module = self.make()
        except Exception:  # a constructor that computes with its weights
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
    size: int
    trace: Trace
    affine: AffineTrace | None
    how: str

    def at(self, size: int) -> Trace:
        return self.trace if self.affine is None or size == self.size else self.affine.at(size)


def _without_data(one: Callable[[int], Trace], given: int) -> _Traced:
    """Return the trace of the given micro-batch, and the line through two sizes if it meets a third."""
    small = [size for size in SMALL if size != given]
    sizes = [given, *small[:2]] if given > 1 else [given, *small]  # what is special about 1 is on no line
    traces = dict(zip(sizes, run_in_forks(*(partial(one, size) for size in sizes)), strict=True))
    first, second, third = sizes[-3:]
    low, high = sorted((first, second))
    line = affine_trace(low, traces[low], high, traces[high])
    trace = traces[given]
    if line is None:
        trace.assumptions.append(UNLIKE)
    elif not line.predicts(third, traces[third]):  # scores of each example against each, say
        trace.assumptions.append("what is held isn't linear in the batch: only the one given is planned")
        line = None
    return _Traced(given, trace, line, "fake tensors")


def _by_real_steps(one: Callable[[int], Trace], given: int) -> _Traced:
    """Return the line through two small micro-batches, as real steps take time and memory; else the given one."""
    low, high, _ = SMALL
    trace = one(low)
    line = affine_trace(low, trace, high, one(high))
    if line is not None:
        return _Traced(low, trace, line, "real steps on the CPU")
    trace = one(given)
    trace.assumptions.append(UNLIKE)
    return _Traced(given, trace, None, "real steps on the CPU")


def _moved(costs: Sequence[Cost]) -> int:
    """Return the bytes that operators read and write on the device."""
    return sum(cost.bytes for cost in costs if cost.stream == COMPUTE)


def _phase_peaks(trace: Trace) -> dict[str, int]:
    peaks = dict.fromkeys(PHASES, 0)
    ends = [*(first for first, _, _ in trace.phases[1:]), len(trace.log.events)]
    for (first, _, name), last in zip(trace.phases, ends, strict=True):
        peaks[name] = max(peaks[name], trace.log.peak(first, last)[0])
    return peaks


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
