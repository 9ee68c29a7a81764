"""Choose which calls of blocks keep their activations, within a budget of bytes.

One batch is counted with every block recomputed. The bytes that a recomputation leaves allocated are the bytes that the
call would have kept since forward. So any other choice takes the bytes of that batch, plus the bytes that each kept
call holds between its forward and its backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from lightning_solo.memory.events import EventLog
from lightning_solo.memory.ledger import Ledger, operator_tensors, storages_of

Call = tuple[str, int]
"""The name of a block, and the number of its call in a batch."""

CUDA_BLOCK = 512  # bytes that the allocator rounds up to: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp
_STEPS = 1024  # the solver distinguishes as many sums of bytes


class WorkLedger(Ledger):  # type: ignore[no-untyped-call]
    """A ledger that also counts work, and records converted copies, such as autocast's of the weights.

    On a CUDA device the size of a storage is that of its block in the allocator.

    Attributes:
        work: FLOPs of products, plus one for each element of any other result.
        copies: number of a converted copy's storage in the log -> number of the original storage.
        sums: numbers of storages that backward has summed into, such as gradients of biases.
    """

    def __init__(self, module: nn.Module | None, optimizers: Iterable[object] = (), device: str | None = None) -> None:
        super().__init__(module, optimizers, device)
        self.work = 0
        self.copies: dict[int, int] = {}
        self.sums: set[int | None] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._to_copy.default:
            numbers = [self.number_of(storage) for storage in storages_of((result, args[0]))]
            if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None:
                self.copies[numbers[0]] = numbers[1]
        elif func is torch.ops.aten.sum.dim_IntList and torch._C._current_graph_task_id() != -1:
            self.sums.update(map(self.number_of, storages_of(result)))
        return result

    def _size(self, storage: UntypedStorage) -> int:
        return _allocated(storage)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of one operator."""
        result = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.work += int(count(*args, **kwargs, out_val=result))
        elif not getattr(func, "is_view", True):
            self.work += sum(tensor.numel() for tensor in operator_tensors(result))
        return result


def _allocated(storage: UntypedStorage) -> int:
    block = CUDA_BLOCK if storage.device.type == "cuda" else 1
    return -(-storage.nbytes() // block) * block


def saved_bytes(run: Callable[[], Any], *known: Any) -> int:
    """Return the bytes that ``run()`` saves for backward, except storages of its result and of ``known``."""
    saved: list[UntypedStorage] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.extend(storages_of(tensor))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    others = {id(storage) for storage in storages_of((known, result))}
    return sum(_allocated(storage) for key, storage in {id(each): each for each in saved}.items() if key not in others)


@dataclass
class Pass:
    """A run of a block's forward: the first run, or a recomputation.

    Attributes:
        first, last: events in the log before the run, and after it.
        work: as `WorkLedger` counts it.
        inputs, outputs: numbers in the log of the storages of arguments and results.
    """

    first: int
    last: int = 0
    work: int = 0
    inputs: list[int | None] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)


class Calls:
    """Numbers the calls of blocks in a batch, and records which keep their activations.

    Attributes:
        kept: calls that aren't recomputed.
        passes: call -> its runs, while a ledger counts.
        compiled: call of a compiled block -> bytes that it saves for backward, while a ledger counts.
    """

    def __init__(self) -> None:
        self.kept: frozenset[Call] = frozenset()
        self.passes: dict[Call, list[Pass]] = {}
        self.compiled: dict[Call, int] = {}
        self._ledger: WorkLedger | None = None
        self._numbers: Counter[str] = Counter()

    def start(self, kept: Iterable[Call] = (), ledger: WorkLedger | None = None) -> None:
        """Begin a batch; with a ledger, count its calls."""
        self.kept, self._ledger = frozenset(kept), ledger
        self.passes, self.compiled = {}, {}
        self._numbers.clear()

    @property
    def counting(self) -> bool:
        """Whether calls are counted."""
        return self._ledger is not None

    def number(self, name: str) -> Call:
        """Return a block's next call."""
        self._numbers[name] += 1
        return name, self._numbers[name] - 1

    def counted(self, call: Call, run: Callable[[], Any], inputs: Any = ()) -> Any:
        """Return ``run()``, a block's forward, and record it if a ledger counts."""
        ledger = self._ledger
        if ledger is None:
            return run()
        one = Pass(len(ledger.log.events), inputs=_numbers(ledger, inputs))
        self.passes.setdefault(call, []).append(one)
        work = ledger.work
        try:
            output = run()
            one.outputs = _numbers(ledger, output)
        finally:  # torch ends a recomputation early by an exception
            one.last, one.work = len(ledger.log.events), ledger.work - work
        return output


def _numbers(ledger: Ledger, tree: Any) -> list[int | None]:
    return list(dict.fromkeys(map(ledger.number_of, storages_of(tree))))


@dataclass
class Options:
    """Bytes that each choice of calls takes at the peak of every segment of a batch."""

    base: Tensor  # int64 (segments,): bytes if every call is recomputed
    # call -> int64 (segments,): extra bytes if the call isn't recomputed, in the order of forward
    extra: dict[Call, Tensor]
    saved: dict[Call, int]  # call -> bytes that it keeps for backward
    work: dict[Call, int]  # call -> cost of its recomputation
    margin: int = 0  # extra bytes of any non-empty choice: one input that is still being copied to the host

    def peak(self, kept: Iterable[Call] = ()) -> int:
        """Return the peak bytes of a choice."""
        chosen = [self.extra[call] for call in kept]
        return int(sum(chosen, self.base).max()) + (self.margin if chosen else 0)

    def within(self, budget: int) -> frozenset[Call]:
        """Return the calls to keep for the least work under a peak of ``budget`` bytes."""
        return least_work(self.base, self.extra, self.work, budget - self.margin)

    def share(self, share: float) -> frozenset[Call]:
        """Return the calls to keep for the least work within a share of the bytes that all of them would keep."""
        saved = {call: torch.tensor([size]) for call, size in self.saved.items()}
        return least_work(torch.zeros(1, dtype=torch.int64), saved, self.work, int(share * sum(self.saved.values())))


def options(ledger: WorkLedger, calls: Calls) -> Options:
    """Return the options of a counted batch, without calls that backward didn't recompute.

    The bytes are an upper bound. A choice takes less if a kept call doesn't need its input, which recomputation always
    keeps. For a compiled block, saved bytes are those of its compiled forward, and temporary memory that of the
    uncompiled block, though fused operators take less.
    """
    history = _History(ledger.log)
    both = {call: (runs[0], runs[1:]) for call, runs in calls.passes.items() if len(runs) > 1}
    # autocast keeps one copy of a weight until forward ends, no matter which block uses it first
    cached = {
        ledger.copies[storage]: storage
        for forward, _ in both.values()
        for storage in history.left(forward)
        if storage in ledger.copies
    }
    originals = {copy: cached[source] for copy, source in ledger.copies.items() if source in cached}
    kept = {
        call: history.kept(forward, again[0], originals, calls.compiled.get(call))
        for call, (forward, again) in both.items()
    }
    marks = {0, len(ledger.log.events)}
    for call, (forward, again) in both.items():
        marks |= {forward.first, forward.last, *(run.first for run in again), *(history.settled(run) for run in again)}
        marks |= {end for _, end in kept[call].shared}
    bounds = sorted(marks)
    starts = sorted(run.first for _, again in both.values() for run in again)
    base = [max(history.live[first : last + 1]) for first, last in pairwise(bounds)]

    def extra(call: Call) -> Tensor:
        forward, again = both[call]
        row = [0] * len(base)
        rise = max(history.live[again[0].first : again[0].last + 1]) - history.live[again[0].first]
        top = history.live[forward.first] + rise
        for index in range(bisect_left(bounds, forward.first), bisect_left(bounds, forward.last)):
            row[index] = max(0, top - base[index])
        for index in range(bisect_left(bounds, forward.last), bisect_left(bounds, again[-1].first)):
            late = sum(size for size, end in kept[call].shared if bounds[index + 1] > end)
            row[index] = kept[call].bytes + late
        # without recomputation, a node's saved tensors are freed only after its results are summed
        after = history.settled(again[-1])
        until = next((start for start in starts if start >= after), bounds[-1])
        largest = history.largest(ledger.sums, after, until)
        for index in range(bisect_left(bounds, after), bisect_left(bounds, until)):
            row[index] += largest
        return torch.tensor(row, dtype=torch.int64)

    ordered = sorted(both, key=lambda call: both[call][0].first)
    return Options(
        torch.tensor(base, dtype=torch.int64),
        {call: extra(call) for call in ordered},
        {call: kept[call].bytes for call in ordered},
        {call: both[call][1][0].work for call in ordered},
        max((history.moved(forward, again[0]) for forward, again in both.values()), default=0),
    )


@dataclass
class _Kept:
    """The storages that a call keeps if it isn't recomputed."""

    bytes: int  # bytes of storages that no other call keeps
    # storages that then live longer: (bytes, number of the event that frees them otherwise)
    shared: list[tuple[int, int]]


class _History:
    """Live bytes after each event of a log, ``live``, and the event that frees each storage."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.live = list(accumulate((change for _, change in log.events), initial=sum(log.held.values())))
        self._size: Counter[int] = Counter(log.held)  # the largest size of each storage
        self._end: dict[int, int] = {}
        now = Counter(log.held)
        for index, (storage, change) in enumerate(log.events, 1):
            now[storage] += change
            self._size[storage] = max(self._size[storage], now[storage])
            if now[storage]:
                self._end.pop(storage, None)
            else:
                self._end[storage] = index

    def end(self, storage: int) -> int:
        """Return the number of events until a storage is freed; of all events if it never is."""
        return self._end.get(storage, len(self.log.events))

    def largest(self, storages: Container[int | None], first: int, last: int) -> int:
        """Return the bytes of the largest of some storages in ``events[first:last]``."""
        return max((self._size[number] for number, _ in self.log.events[first:last] if number in storages), default=0)

    def settled(self, run: Pass) -> int:
        """Return the number of events after which the results of a run are freed."""
        last = run.last
        while last < len(self.log.events) and self.log.events[last][1] < 0:
            last += 1
        return last

    def left(self, run: Pass) -> list[int]:
        """Return the storages that a run allocated and did not free."""
        settled = self.settled(run)
        born = dict.fromkeys(storage for storage, change in self.log.events[run.first : run.last] if change > 0)
        return [storage for storage in born if self.end(storage) > settled]

    def moved(self, forward: Pass, again: Pass) -> int:
        """Return the bytes of the largest input that was moved to the host before the recomputation."""
        inputs = [storage for storage in forward.inputs if storage is not None]
        return max((self._size[storage] for storage in inputs if self.end(storage) <= again.first), default=0)

    def kept(self, forward: Pass, again: Pass, originals: Mapping[int, int], compiled: int | None = None) -> _Kept:
        """Return the storages that a call would keep.

        Args:
            forward: its first run.
            again: its recomputation.
            originals: storage -> a storage of the same contents since forward.
            compiled: bytes that its compiled forward saves besides inputs and outputs; None if it isn't compiled.
        """
        if compiled is not None:
            ends = [number for number in (*forward.inputs, *forward.outputs) if number is not None]
            return _Kept(compiled, [(self._size[number], self.end(number)) for number in ends])
        left = self.left(again)
        same = dict(originals)
        # an output that the block saves is the same in both runs
        same |= {
            copy: output
            for output, copy in zip(forward.outputs, again.outputs, strict=False)
            if output is not None and copy is not None
        }
        shared = [(self._size[copy], self.end(same[copy])) for copy in left if copy in same]
        # an input that would be offloaded stays on the device if this call keeps it
        shared += [(self._size[number], self.end(number)) for number in forward.inputs if number is not None]
        return _Kept(sum(self._size[copy] for copy in left if copy not in same), shared)


def least_work(base: Tensor, extra: Mapping[Call, Tensor], work: Mapping[Call, int], budget: int) -> frozenset[Call]:
    """Return the calls to keep: those that leave the least work to recompute, with no segment above the budget.

    This is a knapsack, solved by dynamic programming over calls in the order of forward: among choices of equal bytes
    the one that saves most work is continued. Backward meets calls in the opposite order, so segments ahead hold all
    calls chosen so far, and only their sum counts. Sums are distinguished to a thousandth of the total; exact bytes
    decide whether a choice fits. Among equal choices the later calls are kept, which hold their bytes for less time.

    Args:
        base: int64 (segments,): bytes of each segment where all calls are recomputed.
        extra: call -> int64 (segments,): extra bytes if it is kept, in the order of forward.
        work: call -> cost of its recomputation.
        budget: bytes.

    >>> zero, two = torch.zeros(1, dtype=torch.int64), torch.tensor([2])
    >>> sorted(least_work(zero, {("a", 0): two, ("b", 0): two + 1}, {("a", 0): 1, ("b", 0): 2}, 4))
    [('b', 0)]
    """
    total = sum(int(row.max()) for row in extra.values())
    step = max(1, total // _STEPS)
    chosen: list[tuple[int, int, frozenset[Call]]] = [(0, 0, frozenset())]  # bytes, work, calls
    used = base[None]
    for call, row in extra.items():
        fits = (used + row <= budget).all(1)
        more = [
            (taken + int(row.max()), done + work[call], calls | {call})
            for (taken, done, calls), fit in zip(chosen, fits.tolist(), strict=True)
            if fit
        ]
        both = torch.cat([used, used[fits] + row])
        best: dict[int, int] = {}
        candidates = [*chosen, *more]
        for index, (taken, done, _) in enumerate(candidates):
            before = best.get(taken // step)
            if before is None or (done, -taken) >= (candidates[before][1], -candidates[before][0]):
                best[taken // step] = index
        front: list[int] = []  # more bytes for more work only
        for _, index in sorted(best.items()):
            if not front or candidates[index][1] > candidates[front[-1]][1]:
                front.append(index)
        chosen, used = [candidates[index] for index in front], both[front]
    return max(chosen, key=lambda choice: (choice[1], -choice[0]))[2]
