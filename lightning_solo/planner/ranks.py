"""The plan of one of an engine's processes: shards, gathered blocks and buckets, from a trace of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_solo.cards.tracing import STATES, Ranks
from lightning_solo.errors import NothingToDoError
from lightning_solo.memory.events import EventLog
from lightning_solo.nn.blocks import named_blocks
from lightning_solo.nn.sharding import without_shared_parameters
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.fake_modules import empty_parameters

SUB_GROUP_ELEMENTS = 1_000_000_000
"""Elements of a process's master that ZeRO-3 steps at a time, DeepSpeed's `sub_group_size`."""


@dataclass(frozen=True)
class Groups:
    """Shares of a module's elements that are gathered together: the largest block, all blocks, and what is in none."""

    block: float = 0.0
    blocks: float = 0.0

    @property
    def root(self) -> float:
        """The share outside of blocks."""
        return 1 - self.blocks

    @classmethod
    def of(cls, make: Callable[[], Any], names: Any) -> Groups:
        """Return the shares of a module's groups; one group if it has no blocks."""
        with empty_parameters():
            module = make()
        total = sum(p.numel() for p in module.parameters())
        try:
            blocks = without_shared_parameters(module, list(named_blocks(module, names, "strategy.blocks").values()))
        except NothingToDoError:
            if names != "auto":
                raise
            return cls()
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        return cls(max(sizes, default=0) / total, sum(sizes) / total) if total else cls()


class _Rank:
    """Rewrites a log event by event."""

    def __init__(self, trace: Trace, ranks: Ranks, processes: int, groups: Groups, cuda: bool) -> None:
        self.trace, self.ranks, self.processes, self.groups, self.cuda = trace, ranks, processes, groups, cuda
        log = trace.log
        self.labels = list(log.labels)
        self.of_step = set[int]()
        self.held = {storage: self.part(storage, size) for storage, size in log.held.items()}
        self.events: list[tuple[int, int]] = []
        self.weights = sum(size for storage, size in log.held.items() if log.labels[storage] == "weights")
        self.gradients = _most(log, "gradients")
        self.extra: dict[str, int] = {}  # storage of what the engine holds, by category
        self.now: dict[str, int] = {}  # its bytes
        trained, frozen = sum(trace.sizes.trainable), sum(trace.sizes.frozen)
        self.trained = self.weights * trained / max(1, trained + frozen)
        self.temporaries = _step_temporaries(trace) if ranks.widening else 0
        self.left = 0.0  # bytes of gradients that backward hasn't computed yet

    def part(self, storage: int, size: int) -> int:
        """Return this process's bytes of a storage."""
        label = self.trace.log.labels[storage]
        if self.ranks.widening and label == "optimizer_states":
            size *= self.ranks.widening  # of the master, which is fp32
        sharded = label in self.ranks.sharded or storage in self.of_step
        return -(-size // self.processes) if sharded else size

    def hold(self, category: str, size: float) -> None:
        """Set the bytes that the engine holds besides."""
        if category not in self.extra:
            self.extra[category] = len(self.labels)
            self.labels.append(category)
        if change := round(size) - self.now.get(category, 0):
            self.events.append((self.extra[category], change))
            self.now[category] = round(size)

    def leave(self, phase: str) -> None:
        """Hold the largest amount at the end of a phase, or what stays after it."""
        root = self.groups.root
        if self.ranks.widening:
            self.enter_of_masters("")
        if self.ranks.gathers and phase == "backward":  # the root's whole gradients and their copy, which is sent
            self.hold("weights", self.weights * root)
            self.hold("gradients", self.gradients * 2 * root)

    def enter(self, phase: str) -> None:
        """Change what is held at the start of a phase."""
        weights, groups = self.weights, self.groups
        block, root = groups.block, groups.root
        self.left = self.trained
        if self.ranks.widening:
            self.enter_of_masters(phase)
        if self.ranks.gathers:
            kept = groups.blocks if self.ranks.keeps_blocks else block
            if phase == "forward":  # the root, the buffer in which it came, the first block and its buffer
                self.hold("weights", weights * 2 * (root + block))
            # a block, its buffer, and in forward the buffer of the one before
            held = {"forward": root + kept + 2 * block, "backward": root + kept + block}.get(phase, 0.0)
            self.hold("weights", weights * held)
            self.hold("gradients", 0)

    def enter_of_masters(self, phase: str) -> None:
        """Change what ZeRO holds: the master, flat gradients, buckets, and fp32 gradients in the step."""
        ranks, sizes = self.ranks, self.trace.sizes
        element = self.weights / max(1, sum(sizes.trainable) + sum(sizes.frozen))
        share, bucket = self.trained / self.processes, ranks.bucket_bytes
        self.hold("optimizer_states", share * ranks.widening)
        held = share + bucket  # its flat gradients, and the bucket
        if ranks.kept_bytes:
            ahead = bucket + element * max(*sizes.trainable, *sizes.frozen, 0)  # a module's weights, and the next ones
            gathered = min(self.weights, ranks.kept_bytes + ahead) + min(self.weights, ahead)  # and as they were sent
            self.hold("weights", gathered if phase in ("forward", "backward") else 0)
        elif phase == "backward":  # two buckets, and the copy of one that is sent
            held = 2 * bucket + min(self.trained, bucket) + share * max(0.0, 1 - bucket / max(1, self.trained))
        else:
            held = share
        stepped = min(1.0, SUB_GROUP_ELEMENTS * element / max(1.0, share)) if phase == "optimizer_step" else 0
        self.hold("gradients", held + stepped * share * ranks.widening)
        converted = share if ranks.widening > 1 else 0  # the flat gradients, before they are fp32
        temporaries = self.temporaries * ranks.widening / self.processes
        self.hold("temporaries", stepped * max(converted, temporaries))

    def reduces(self, change: int) -> None:
        """Hold a block's whole gradients without its shard, and those of the one before, which are sent.

        The next block is gathered meanwhile, if there is one. A GPU's allocator also keeps forward's second buffer,
        which is of another stream.
        """
        groups = self.groups
        is_last = self.left <= self.weights * groups.block
        self.left -= max(change, 0)
        kept = groups.blocks if self.ranks.keeps_blocks else groups.block
        buffers = (not is_last and not self.ranks.keeps_blocks) + self.cuda
        self.hold("weights", self.weights * (groups.root + kept + groups.block * buffers))
        self.hold("gradients", self.gradients * (groups.root + (2 - 1 / self.processes) * groups.block))

    def rewritten(self) -> Trace:
        """Return the trace of one process."""
        log, firsts = self.trace.log, {first: name for first, _, name in self.trace.phases}
        buckets = self.ranks.buckets
        if buckets is not None:
            self.hold("gradients", self.gradients)
        elif self.ranks.widening:
            self.enter_of_masters("")
        starts: dict[int, int] = {}
        sizes: dict[int, int] = dict(log.held)
        phase, steps = "", 0
        for index, (storage, change) in enumerate([*log.events, (-1, 0)]):
            if index in firsts:
                self.leave(phase)
                steps += phase == "optimizer_step"
                phase, starts[index] = firsts[index], len(self.events)
                self.enter(phase)
                if buckets is not None and self.ranks.rebuilds and steps == 1 and phase == "forward":
                    self.hold("gradients", 2 * self.gradients)  # for a moment, the old buckets and the new ones
                    self.hold("gradients", self.gradients)
            if storage < 0:
                break
            is_gradient = log.labels[storage] == "gradients"
            before_size = sizes.get(storage, 0)
            sizes[storage] = before_size + change
            if (buckets == "views" or self.ranks.widening) and is_gradient:
                if change > 0:  # a gradient moves to its bucket as soon as it is computed
                    self.events += [(storage, change), (storage, -change)]
                continue
            if self.ranks.gathers and is_gradient and phase == "backward":
                self.reduces(change)
            if phase == "optimizer_step" and not before_size and self.ranks.sharded:
                self.of_step.add(storage)  # the step's temporaries are of shards
            if self.ranks.widening and storage in self.of_step and log.labels[storage] not in STATES:
                continue
            self.events.append((storage, self.part(storage, sizes[storage]) - self.part(storage, before_size)))
        phases = [(starts[first], costs, name) for first, costs, name in self.trace.phases]
        return replace(self.trace, log=EventLog(self.events, self.labels, self.held, log.aside), phases=phases)


def of_rank(trace: Trace, ranks: Ranks, processes: int, groups: Groups, *, cuda: bool) -> Trace:
    """Return the trace of one of several processes.

    Args:
        trace: of one process alone.
        ranks: what the engine holds.
        processes: their number.
        groups: shares of the module that are gathered together.
        cuda: whether collectives run beside computation.
    """
    return _Rank(trace, ranks, processes, groups, cuda).rewritten()


def _most(log: EventLog, label: str) -> int:
    """Return the most bytes of a category at once."""
    of_it = EventLog(
        [event for event in log.events if log.labels[event[0]] == label],
        log.labels,
        {storage: size for storage, size in log.held.items() if log.labels[storage] == label},
    )
    return of_it.peak()[0]


def _step_temporaries(trace: Trace) -> int:
    """Return the most bytes that a step of all parameters as one flat tensor takes for a time.

    That is what all parameters take one after another, which an optimizer over lists takes at once. If fewer are alive
    at a time than a parameter takes in all, it is what the largest parameter takes at once, for all of them.
    """
    log, sizes, most = trace.log, trace.sizes.trainable, 0
    ends = [first for first, _, _ in trace.phases[1:]] + [len(log.events)]
    for (first, _, phase), end in zip(trace.phases, ends, strict=True):
        if phase == "optimizer_step":
            events = [event for event in log.events[first:end] if log.labels[event[0]] not in STATES]
            at_once = EventLog(events).peak()[0] * sum(sizes) / max(1, *sizes)
            most = max(most, min(sum(max(0, change) for _, change in events), round(at_once)))
    return most
