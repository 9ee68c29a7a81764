"""The planner: peak memory by category and phase, verdict and step time of one preset on a device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.footprint import ELEMENT_BYTES
from lightning_solo.errors import PlanError
from lightning_solo.memory.events import EventLog
from lightning_solo.planner.batch_scaling import AffineTrace, affine_trace
from lightning_solo.planner.batches import examples, first_batch, sized, storage_bytes
from lightning_solo.planner.capture import Trace, capture
from lightning_solo.planner.device import Device, assumed
from lightning_solo.planner.few_blocks import BlockTraces, Captured, FewBlocks
from lightning_solo.planner.notes import resolved
from lightning_solo.planner.plan import TIGHT, Plan, verdict_of
from lightning_solo.planner.ranks import Groups, of_rank
from lightning_solo.planner.replay import Capacities
from lightning_solo.planner.rules import Arrangement, arrange
from lightning_solo.planner.step_time import step_schedule, step_seconds
from lightning_solo.planner.timeline import COMPUTE, condensed
from lightning_solo.planner.tracer import PHASES, Cost
from lightning_solo.planner.traces import FAKE, FIRST_KIND, SMALL, ScalableTrace, scalable_trace

STATES = ("weights", "gradients", "optimizer_states")
MOST = 2**20  # largest micro-batch that is tried


@dataclass
class Planner:
    """Plans presets for one module; equal traces are computed once. Arguments are those of `preset_plans.plan`."""

    make: Callable[[], Any]
    batch: Any
    trainer: Mapping[str, Any]
    device: Device
    budget: int
    micro_batch: int | None = None
    host_memory: int | None = None

    def __post_init__(self) -> None:
        if self.batch is None:
            self.batch = first_batch(self.make)
        elif hasattr(self.batch, "train_dataloader"):
            self.batch = first_batch(partial(copy, self.batch))
        elif callable(self.batch):
            self.batch = self.batch()
        self._examples = examples(self.batch)
        self.micro_batch = self.micro_batch or self._examples
        self._traces: dict[str, ScalableTrace] = {}
        self._pair: tuple[int, int] | None = None  # of the first trace, whichever presets are planned beside it
        self._last: dict[tuple[int, bool], Capacities] = {}
        self._shares: dict[str, Groups] = {}  # of a module's blocks, by the setting that names them

    @cached_property
    def _blocks(self) -> FewBlocks:
        return FewBlocks(self.make)

    @property
    def _cuda(self) -> bool:
        return self.device.name != "cpu"

    def plan(self, name: str, config: Configuration) -> Plan:
        """Return the plan of one preset.

        Raises:
            PlanError: the module can't be traced.
        """
        arranged = arrange(config, self.trainer)
        assert self.micro_batch is not None
        size = min(self.micro_batch, arranged.at_most or self.micro_batch)
        scalable = self._trace(arranged, size)
        if arranged.splits and size == self.micro_batch:
            undivided = arrange(config, self.trainer, undivided=True)
            if not undivided.splits:
                whole = self._trace(undivided, size)
                if self._fits_at(self.at(size, undivided, whole), undivided):
                    arranged, scalable = undivided, whole
        device_assumptions = assumed(self.device, arranged.precision)
        assumptions = [*scalable.trace.assumptions, *arranged.assumptions, *device_assumptions]
        largest = None
        if scalable.affine is not None:
            largest = self._largest(arranged, scalable)
        elif scalable.alone:
            largest = 0
        # a number that is written runs if it fits at all; auto has to find one
        if arranged.splits and not (arranged.at_most and self._fits_at(self.at(size, arranged, scalable), arranged, 0)):
            size = min(size, largest or size)
        if arranged.splits:
            arranged = replace(arranged, accumulation=arranged.accumulation * -(-self.micro_batch // size))
        planned = self.at(size, arranged, scalable)
        memory = self._memory(planned, arranged)
        return Plan(
            preset=name,
            device=self.device.name,
            micro_batch=size,
            phases=_phase_peaks(planned),
            budget_bytes=self.budget,
            verdict=verdict_of(memory["needed_bytes"], self.budget),
            host_bytes=planned.host_bytes,
            largest_micro_batch=largest,
            assumptions=tuple(dict.fromkeys(assumptions)),
            traced=scalable.how,
            accumulation=arranged.accumulation,
            batch=self.micro_batch,
            **memory,
            **self._cost(planned, arranged),
        )

    def captured(self, arranged: Arrangement, size: int) -> Trace:
        """Return the trace of a micro-batch of ``size`` examples, with marks of the blocks.

        Unless the preset divides batches, a later `plan` uses this trace, and traces no other size.
        """
        (trace,) = self._marked(arranged, size)
        if not arranged.splits:  # else `plan` may take a smaller micro-batch
            self._traces.setdefault(self._key(arranged, size), ScalableTrace(size, trace, None, FAKE))
        return self._with_untraced(trace, arranged, size)

    def scaled(self, arranged: Arrangement) -> AffineTrace | None:
        """Return the traces of all micro-batches, with marks of the blocks, from two; None if they don't follow."""
        low, high = SMALL[:2]
        at_low, at_high = self._marked(arranged, low, high)
        return affine_trace(low, at_low, high, at_high)

    def _marked(self, arranged: Arrangement, *sizes: int) -> list[Trace]:
        captured = [partial(self._captured, arranged, size, marked=True) for size in sizes]
        blocks = self._block_traces(arranged, captured[0])
        return [blocks.trace(each) for each in captured]

    def costs(self, arranged: Arrangement, trace: Trace) -> tuple[int, float]:
        """Return the device bytes that a traced preset needs, and the seconds of a step."""
        return self._memory(trace, arranged)["needed_bytes"], self._cost(trace, arranged)["seconds_per_step"]

    def check_module(self, precisions: Iterable[str | None]) -> None:
        """Check that the module can be traced without techniques, in at least one of the precisions.

        Raises:
            PlanError: it can't be traced; the error is that of the first precision.
        """
        errors: list[PlanError] = []
        for precision in precisions:
            try:
                self._trace(arrange(Configuration(precision), self.trainer), self.micro_batch or 1)
                return
            except PlanError as error:
                errors.append(error)
        raise errors[0]

    def at(self, size: int, arranged: Arrangement, scalable: ScalableTrace | AffineTrace) -> Trace:
        """Return the trace of a micro-batch of ``size`` examples, with the parts that aren't traced."""
        return self._with_untraced(scalable.at(size), arranged, size)

    def _with_untraced(self, trace: Trace, arranged: Arrangement, size: int) -> Trace:
        if arranged.states is not None:
            window = max(arranged.accumulation, arranged.window)
            trace = _with_buffers(trace, *arranged.states.buffers(trace.sizes, arranged.precision, window))
        if arranged.ranks is not None:
            groups = self._groups(arranged.ranks.blocks)
            trace = of_rank(trace, arranged.ranks, arranged.processes, groups, cuda=self._cuda)
        return self._with_batches(trace, arranged, size)

    def _groups(self, blocks: Any) -> Groups:
        if (key := repr(blocks)) not in self._shares:
            self._shares[key] = Groups.of(self.make, blocks)
        return self._shares[key]

    def _with_batches(self, trace: Trace, arranged: Arrangement, size: int) -> Trace:
        """Return the trace with the prefetched batches, and on a GPU also the current one.

        A GPU's batches are copied from pinned memory, which may be in use for all prefetched batches at once.
        """
        if not arranged.ahead:
            return trace
        assert self.micro_batch is not None
        batch = storage_bytes(self.batch, self._examples, self.micro_batch if arranged.splits else size)
        host_bytes = trace.host_bytes + arranged.ahead * sum(batch)
        if not self._cuda:
            return replace(trace, host_bytes=host_bytes)
        first, copies = len(trace.log.labels), batch * (arranged.ahead + 1)
        held = dict(enumerate(copies, first))
        labels = [*trace.log.labels, *["other"] * len(copies)]
        log = replace(trace.log, labels=labels, held={**trace.log.held, **held}, aside=frozenset(held))
        return replace(trace, log=log, host_bytes=host_bytes)

    # --- memory ---

    def _memory(self, trace: Trace, arranged: Arrangement) -> dict[str, Any]:
        """Return the device memory of a trace, by attribute of `Plan`."""
        peak, where = trace.log.peak()
        breakdown = trace.log.breakdown(where)
        needed = reserved = peak
        if self._cuda:
            workspace, context = self.device.workspace_bytes, self.device.context_bytes
            capacities = self._capacities(trace, arranged)
            exact, peak = peak, capacities.peak_allocated
            breakdown |= {"workspace": workspace, "rounding": peak - exact - workspace}
            needed, reserved = capacities.smallest() + context, capacities.peak_reserved() + context
            if needed <= self.budget < reserved:  # unused segments are released in time
                reserved = capacities.peak_reserved(self.budget - context) + context
        return {"peak_bytes": peak, "breakdown": breakdown, "needed_bytes": needed, "reserved_bytes": reserved}

    def _fits_at(self, trace: Trace, arranged: Arrangement, margin: float = TIGHT) -> bool:
        room = int(self.budget / (1 + margin))
        if not self._cuda:
            return trace.log.peak()[0] <= room
        return self._capacities(trace, arranged).fits(room - self.device.context_bytes)

    def _capacities(self, trace: Trace, arranged: Arrangement) -> Capacities:
        """Return the capacities that a trace fits into. Those of the last four traces are kept, with their replays."""
        key = id(trace.log), arranged.expandable_segments  # each of the kept ones also keeps its log
        if key not in self._last:
            self._last = dict([*self._last.items()][-3:])
            workspace = self.device.workspace_bytes
            self._last[key] = Capacities(trace.log, workspace, expandable=arranged.expandable_segments)
        return self._last[key]

    def _largest(self, arranged: Arrangement, scalable: ScalableTrace) -> int:
        """Return the largest micro-batch that fits, by doubling and bisection."""

        def fits(size: int) -> bool:
            return self._fits_at(self.at(size, arranged, scalable), arranged)

        if not fits(1):
            return 0
        low, high = 1, 2
        while high <= MOST and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # --- time ---

    def _cost(self, trace: Trace, arranged: Arrangement) -> dict[str, Any]:
        """Return the costs of the last optimizer step with all its micro-batches, by attribute of `Plan`."""
        first, last = trace.steps[-2], trace.steps[-1]
        starts = [costs for _, costs, _ in trace.phases]
        phases = [trace.phases[bisect_right(starts, index) - 1][2] for index in range(first, last)]
        costs = trace.costs[first:last]
        windows = arranged.accumulation / arranged.window
        in_batches = [cost for cost, phase in zip(costs, phases, strict=True) if phase != "optimizer_step"]
        in_step = [cost for cost, phase in zip(costs, phases, strict=True) if phase == "optimizer_step"]
        if arranged.states is None:
            seconds = step_seconds(costs, self.device)
            if windows != 1:
                seconds += (windows - 1) * step_seconds(in_batches, self.device)
        else:
            moved, update = arranged.states.seconds(
                trace.sizes, arranged.precision, arranged.accumulation, self.device.host_bandwidth
            )
            seconds, in_step = max(windows * step_seconds(in_batches, self.device), moved) + update, []
        overlaps = any(cost.stream != COMPUTE for cost in costs)
        return {
            "seconds_per_step": seconds,
            "flops": round(sum(cost.flops for cost in in_batches) * windows) + sum(cost.flops for cost in in_step),
            "bytes_moved": round(_moved(in_batches) * windows) + _moved(in_step),
            "timeline": tuple(condensed(step_schedule(costs, self.device, phases))) if overlaps else (),
        }

    def key(self, config: Configuration) -> str:
        """Return a text that presets with the same trace have in common."""
        arranged = arrange(config, self.trainer)
        assert self.micro_batch is not None
        return self._key(arranged, min(self.micro_batch, arranged.at_most or self.micro_batch))

    def _key(self, arranged: Arrangement, micro_batch: int) -> str:
        return repr((arranged.arguments(), micro_batch, self._moves_batches(arranged)))

    def _moves_batches(self, arranged: Arrangement) -> bool:
        return not (arranged.ahead and self._cuda)  # prefetched batches are on the device before their step

    def _trace(self, arranged: Arrangement, micro_batch: int) -> ScalableTrace:
        key = self._key(arranged, micro_batch)

        def fits(trace: Trace) -> bool:
            return self._fits_at(self._with_untraced(trace, arranged, micro_batch), arranged)

        known = self._traces.get(key)
        if known is None or (known.alone and fits(known.trace)):  # this preset's states leave more room
            weight_bytes = ELEMENT_BYTES.get(str(arranged.arguments().get("precision")), 4)

            first = partial(self._captured, arranged, micro_batch)
            blocks = self._block_traces(arranged, first)

            def one(size: int, **kind: Any) -> Trace:
                if kind != FIRST_KIND:
                    return resolved(self._captured(arranged, size, self.make, **kind))
                return blocks.trace(first if size == micro_batch else partial(self._captured, arranged, size))

            pair, scales = self._pair, arranged.scales
            scalable = scalable_trace(one, self.make, micro_batch, weight_bytes, pair, scales, fits)
            self._pair = self._pair if self._traces else scalable.pair
            self._traces[key] = scalable
        return self._traces[key]

    def _block_traces(self, arranged: Arrangement, captured: Captured) -> BlockTraces:
        # techniques that choose by bytes don't treat blocks alike
        alike = arranged.scales and not arranged.mixed and (self._blocks.groups_are_small or not arranged.released)
        precision = "" if arranged.foreign else arranged.precision
        return BlockTraces(self._blocks, self.make, captured, alike=alike, ring=arranged.ring, precision=precision)

    def _captured(
        self,
        arranged: Arrangement,
        size: int,
        make: Callable[[], Any],
        *,
        callback: Callback | None = None,
        named: Callable[[str], str | None] = str,
        **kind: Any,
    ) -> Trace:
        """Return the trace of a micro-batch of ``size`` examples, with notes."""
        given = arranged.arguments(named)
        callbacks = [*given["callbacks"], *([callback] if callback is not None else [])]
        moves_batches = self._moves_batches(arranged)
        how = {"cuda": self._cuda, "steps": arranged.steps, "moves_batches": moves_batches, "noted": True, **kind}
        how |= {"host": self.host_memory, "answers": arranged.answers}
        return capture(make, sized(self.batch, self._examples, size), {**given, "callbacks": callbacks}, **how)


def _moved(costs: Sequence[Cost]) -> int:
    """Return the bytes that operators read and write on the device."""
    return sum(cost.bytes for cost in costs if cost.stream == COMPUTE)


def _phase_peaks(trace: Trace) -> dict[str, int]:
    peaks = dict.fromkeys(PHASES, 0)
    ends = [*(first for first, _, _ in trace.phases[1:]), len(trace.log.events)]
    for (first, _, name), last in zip(trace.phases, ends, strict=True):
        peaks[name] = max(peaks[name], trace.log.peak(first, last)[0])
    return peaks


def _with_buffers(trace: Trace, buffers: Sequence[tuple[str, int]], host_bytes: int) -> Trace:
    """Return the trace with an engine's buffers in place of the model states."""
    labels = list(trace.log.labels)
    firsts = [first for first, _, _ in trace.phases]
    dropped = {number for number, label in enumerate(labels) if label in STATES}
    events = []
    for index, (storage, change) in enumerate(trace.log.events):
        if change > 0 and trace.phases[bisect_right(firsts, index) - 1][2] == "optimizer_step":
            dropped.add(storage)
        if storage not in dropped:
            events.append((index, (storage, change)))
    held = {storage: size for storage, size in trace.log.held.items() if storage not in dropped}
    for category, size in buffers:
        held[len(labels)] = size
        labels.append(category)
    kept = [index for index, _ in events]
    phases = [(bisect_left(kept, first), costs, name) for first, costs, name in trace.phases]
    log = EventLog([event for _, event in events], labels, held)
    return replace(trace, log=log, phases=phases, host_bytes=host_bytes)
