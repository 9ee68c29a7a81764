"""Compute the trace of a module with many equal blocks from traces of few: each block repeats parts of the trace.

A trace with one block more has further repetitions of some periods: one in forward, one in backward, one in each
operator over lists of parameters. They are inserted in the middle of the repetitions that the shorter trace has, so
that special first and last blocks stay what they are. An event of a repetition changes a storage that was allocated in
a repetition of another period. The number of the latter is fixed, or grows or falls by one with each repetition.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from lightning_solo.cards.footprint import Sizes
from lightning_solo.memory.events import EventLog
from lightning_solo.planner.batch_scaling import canonical
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.notes import is_note
from lightning_solo.planner.tracer import Cost

LEAST_REPEATS = 2
"""Repetitions of a period in the shorter trace, from which further ones follow."""


LARGEST_SUM = 2**16
"""Bytes of the largest storage that may grow with each block, such as norms of gradients; buffers have a limit."""
MOST_TRIES = 5000
"""Explanations of differences that are tried in a part of a trace."""


class NotRepeatedError(Exception):
    """The traces differ by more than repetitions."""


@dataclass(frozen=True, order=True)
class Period:
    """A part of the shorter sequence that is repeated.

    Attributes:
        start: index of the first repetition.
        width: length of a repetition.
        repeats: number of repetitions.
        run: number of the run of blocks that repeats it.
    """

    start: int
    width: int
    repeats: int
    run: int

    @cached_property
    def half(self) -> int:
        """The number of repetitions before the inserted ones."""
        return (self.repeats + 1) // 2

    @cached_property
    def cut(self) -> int:
        """The index before which repetitions are inserted."""
        return self.start + self.half * self.width


class Place(NamedTuple):
    """A position in a sequence: an index of the shorter one, or of a repetition of a period.

    Attributes:
        token: index in the shorter sequence; of a repetition that is inserted, that of the last one before it.
        period: number of the period; -1 outside of periods.
        repetition: its number among all repetitions of the period in this sequence.
        inserted: whether the shorter sequence lacks the repetition.
    """

    token: int
    period: int = -1
    repetition: int = 0
    inserted: bool = False


class Stretch:
    """The repeated periods of a sequence, found by comparing it with longer ones.

    Args:
        short: the sequence.
        longer: for each run of blocks, the sequence with one block more.
        ends: indices at which parts of ``short`` end, and then of each longer sequence.
        alike: whether two tokens may stand for each other though they differ, such as sums over all blocks.

    Raises:
        NotRepeatedError: a sequence differs by more than repetitions.
    """

    def __init__(
        self,
        short: Sequence[Any],
        longer: Sequence[Sequence[Any]],
        ends: Sequence[Sequence[int]],
        alike: Callable[[Any, Any], bool] = lambda first, second: False,
    ) -> None:
        self.short = short
        periods: list[Period] = []
        for run, long in enumerate(longer):
            begin = begin_long = 0
            for end, end_long in zip(ends[0], ends[run + 1], strict=True):
                part, other = short[begin:end], long[begin_long:end_long]
                periods += (
                    Period(begin + start, width, repeats, run) for start, width, repeats in _periods(part, other, alike)
                )
                begin, begin_long = end, end_long
        self.periods: list[Period] = []
        end = 0
        for period in sorted(periods):
            over = max(0, end - period.start)  # a block of one run may begin as one of the next run does
            start, repeats = period.start + over, period.repeats - -(-over // period.width)
            if repeats < LEAST_REPEATS:
                raise NotRepeatedError
            self.periods.append(replace(period, start=start, repeats=repeats))
            end = start + period.width * repeats
        self._starts = [period.start for period in self.periods]

    def places(self, more: Sequence[int]) -> Iterator[Place]:
        """Yield the place of each token in the sequence with ``more`` blocks in each run."""
        done = 0
        for number, period in enumerate(self.periods):
            yield from (self.place(index, more) for index in range(done, period.cut))
            for repetition in range(period.half, period.half + more[period.run]):
                for index in range(period.cut - period.width, period.cut):
                    yield Place(index, number, repetition, inserted=True)
            done = period.cut
        yield from (self.place(index, more) for index in range(done, len(self.short)))

    def place(self, index: int, more: Sequence[int]) -> Place:
        """Return the place of a token of the shorter sequence."""
        number = bisect_right(self._starts, index) - 1
        if number < 0:
            return Place(index)
        period = self.periods[number]
        repetition = (index - period.start) // period.width
        if repetition >= period.repeats:
            return Place(index)
        return Place(index, number, repetition + (more[period.run] if index >= period.cut else 0))

    def moved(self, index: int, more: Sequence[int]) -> int:
        """Return the index of a token of the shorter sequence, or of its end, in the longer one."""
        return index + sum(period.width * more[period.run] for period in self.periods if period.cut <= index)

    def index_of(self, place: Place, repetition: int, more: Sequence[int]) -> tuple[int, int]:
        """Return (index in the shorter sequence, number of the inserted repetition or -1) of another repetition.

        Raises:
            NotRepeatedError: there is no such repetition.
        """
        period = self.periods[place.period]
        added = more[period.run]
        if not 0 <= repetition < period.repeats + added:
            raise NotRepeatedError
        offset = (place.token - period.start) % period.width
        if period.half <= repetition < period.half + added:
            return period.cut - period.width + offset, repetition - period.half
        return period.start + (repetition - (added if repetition >= period.half else 0)) * period.width + offset, -1


Step = tuple[int, int, tuple[int, int, int] | None]
"""Indices after a difference of two sequences, and the period (start, width, repeats) that explains it, if one does."""


def _periods(
    short: Sequence[Any], long: Sequence[Any], alike: Callable[[Any, Any], bool]
) -> list[tuple[int, int, int]]:
    """Return (start, width, repeats) of each period of which ``long`` has one repetition more.

    Differences are explained one after another; if the rest can't be, the next explanation is tried.

    Raises:
        NotRepeatedError: the differences can't be explained by repetitions.
    """
    first = _after_equal(short, long, 0, 0)
    steps: list[Step] = [(*first, None)]
    open_choices = [_explanations(short, long, *first, 0, alike)]
    tried = 0
    while steps[-1][:2] != (len(short), len(long)):
        tried += 1
        step = next(open_choices[-1], None)
        if step is None or tried > MOST_TRIES:
            steps.pop()
            open_choices.pop()
            if not steps or tried > MOST_TRIES:
                raise NotRepeatedError
            continue
        i, j, period = step
        i, j = _after_equal(short, long, i, j)
        steps.append((i, j, period))
        begin = max(
            (start + width * repeats for _, _, found in steps if found for start, width, repeats in [found]), default=0
        )
        open_choices.append(_explanations(short, long, i, j, begin, alike))
    return [period for _, _, period in steps if period is not None]


def _after_equal(short: Sequence[Any], long: Sequence[Any], i: int, j: int) -> tuple[int, int]:
    while i < len(short) and j < len(long) and short[i] == long[j]:
        i, j = i + 1, j + 1
    return i, j


def _explanations(
    short: Sequence[Any], long: Sequence[Any], i: int, j: int, begin: int, alike: Callable[[Any, Any], bool]
) -> Iterator[Step]:
    """Yield the ways in which two sequences may differ at ``i`` and ``j``: first by the longest period."""
    inserted = (len(long) - j) - (len(short) - i)
    for width in range(min(inserted, (i - begin) // LEAST_REPEATS), 0, -1):
        if long[j - width : j] != long[j : j + width] or short[i - width : i] != long[j : j + width]:
            continue
        repeats = 1
        while (
            i - width * (repeats + 1) >= begin
            and short[i - width * (repeats + 1) : i - width * repeats] == short[i - width : i]
        ):
            repeats += 1
        if repeats >= LEAST_REPEATS:
            yield i, j + width, (i - width * repeats, width, repeats)
    if i < len(short) and j < len(long) and alike(short[i], long[j]):
        yield i + 1, j + 1, None


@dataclass
class _Tokens:
    """A trace as sequences for a `Stretch`; an allocation's index is that of the storage's first token."""

    trace: Trace
    storages: list[tuple[Any, ...]] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    births: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        log = canonical(self.trace.log, self.trace.phases)
        self.trace = replace(self.trace, log=log)
        for storage, size in [*log.held.items(), *log.events]:
            is_new = storage not in self.births
            self.births.setdefault(storage, len(self.storages))
            self.storages.append((is_new, size > 0, log.labels[storage], size))
            self.owners.append(storage)

    @property
    def costs(self) -> list[tuple[Any, ...]]:
        return [(cost.dtype, cost.stream, cost.flops, cost.bytes) for cost in self.trace.costs]

    @property
    def ends(self) -> tuple[list[int], list[int]]:
        """Ends of the phases among events, after those that are held at the start, and among costs."""
        phases, held = self.trace.phases, len(self.trace.log.held)
        events = [held + event for event, _, _ in phases]
        return [*events, held + len(self.trace.log.events)], [*(cost for _, cost, _ in phases), len(self.trace.costs)]


class DepthTrace:
    """The traces of a module with any number of equal blocks.

    Args:
        short: with few blocks in each run.
        longer: for each run, with one block more.

    Raises:
        NotRepeatedError: the traces differ by more than repetitions.
    """

    def __init__(self, short: Trace, longer: Sequence[Trace]) -> None:
        self._short, self._longer = _Tokens(short), [_Tokens(trace) for trace in longer]
        every = [self._short, *self._longer]
        if any(_setting(tokens) != _setting(self._short) for tokens in self._longer):
            raise NotRepeatedError
        self._ones = [[int(run == other) for other in range(len(longer))] for run in range(len(longer))]
        self._events = Stretch(*_parts(every, lambda t: t.storages, lambda t: t.ends[0]), _alike(3))
        self._costs = Stretch(*_parts(every, lambda t: t.costs, lambda t: t.ends[1]), _alike(2))
        self._trainable = Stretch(*_parts(every, lambda t: t.trace.sizes.trainable))
        self._frozen = Stretch(*_parts(every, lambda t: t.trace.sizes.frozen))
        self._sums = self._growths(self._events, lambda t: [token[3] for token in t.storages])
        self._flops = self._growths(self._costs, lambda t: [cost.flops for cost in t.trace.costs])
        self._bytes = self._growths(self._costs, lambda t: [cost.bytes for cost in t.trace.costs])
        self._slots = self._growths(self._costs, lambda t: [cost.slot for cost in t.trace.costs])
        self._places = [list(self._events.places(ones)) for ones in self._ones]  # of each longer trace
        self._moving = self._literal_births()
        self._repeated = self._repeated_births()
        self._repeated_slots = self._inserted_slots()

    def at(self, more: Sequence[int], trace: Trace | None = None) -> Trace:
        """Return the trace with ``more`` blocks in each run.

        Args:
            more: blocks that the shorter trace lacks, for each run.
            trace: of as many blocks as the shorter one with another micro-batch; by default the shorter one itself.

        Raises:
            NotRepeatedError: the trace has other operators, or sums over blocks that depend on the micro-batch.
        """
        tokens = self._short if trace is None else _Tokens(trace)
        if trace is not None:
            self._check(tokens)
        short = tokens.trace
        numbers: dict[tuple[int, int], int] = {}  # (index of the allocation, inserted repetition) -> storage
        sizes: list[tuple[int, int]] = []
        labels: list[str] = []
        for place in self._events.places(more):
            key = self._birth(place, more)
            if key not in numbers:
                numbers[key] = len(labels)
                labels.append(tokens.storages[place.token][2])
            size = tokens.storages[place.token][3]
            if not place.inserted and (growth := self._sums.get(place.token)) is not None:
                size += (grows := _dot(more, growth))
                if grows and abs(size) > LARGEST_SUM and not is_note(labels[numbers[key]]):
                    raise NotRepeatedError
            sizes.append((numbers[key], size))
        held = len(short.log.held)
        first = self._events.moved(held, more)
        phases = [
            (self._events.moved(held + event, more) - first, self._costs.moved(cost, more), name)
            for event, cost, name in short.phases
        ]
        return replace(
            short,
            log=EventLog(sizes[first:], labels, dict(sizes[:first])),
            phases=phases,
            costs=list(self._grown_costs(more, short.costs)),
            steps=[self._costs.moved(step, more) for step in short.steps],
            host_bytes=short.host_bytes + _dot(more, self._grown(lambda t: t.host_bytes)),
            sizes=Sizes(
                tuple(short.sizes.trainable[place.token] for place in self._trainable.places(more)),
                tuple(short.sizes.frozen[place.token] for place in self._frozen.places(more)),
                short.sizes.buffer_bytes + _dot(more, self._grown(lambda t: t.sizes.buffer_bytes)),
            ),
        )

    def _grown(self, number: Callable[[Trace], int]) -> list[int]:
        return [number(tokens.trace) - number(self._short.trace) for tokens in self._longer]

    def _growths(self, stretch: Stretch, numbers: Callable[[_Tokens], list[int]]) -> dict[int, list[int]]:
        """Return the tokens whose numbers grow with a block of a run, and by how much."""
        short, longer = numbers(self._short), [numbers(tokens) for tokens in self._longer]
        moved = [[stretch.moved(index, ones) for index in range(len(short))] for ones in self._ones]
        growths: dict[int, list[int]] = {}
        for index, number in enumerate(short):
            growth = [other[where[index]] - number for other, where in zip(longer, moved, strict=True)]
            if any(growth):
                growths[index] = growth
        return growths

    def _literal_births(self) -> list[tuple[Place, int]]:
        """Return for each token of the shorter trace the place of its allocation, and the run that moves it or -1."""
        births: list[tuple[Place, int]] = []
        none = [0] * len(self._longer)
        moved = [[self._events.moved(i, ones) for i in range(len(self._short.owners))] for ones in self._ones]
        for index, storage in enumerate(self._short.owners):
            birth = self._events.place(self._short.births[storage], none)
            moving = -1
            for run, tokens in enumerate(self._longer):
                other = self._places[run][tokens.births[tokens.owners[moved[run][index]]]]
                if not self._is_same(birth, other):
                    raise NotRepeatedError
                if birth.period >= 0 and self._events.periods[birth.period].run == run:
                    if other.repetition - birth.repetition not in (0, 1):
                        raise NotRepeatedError
                    moving = run if other.repetition > birth.repetition else -1
                elif other.repetition != birth.repetition:
                    raise NotRepeatedError
            births.append((birth, moving))
        return births

    def _repeated_births(self) -> dict[int, tuple[Place, int]]:
        """Return for each token before a cut, which is repeated, the place of its first copy's allocation, and a step.

        The step is the change of the allocation's repetition from copy to copy, 0 for the same allocation.
        """
        births: dict[int, tuple[Place, int]] = {}
        for run, (places, tokens) in enumerate(zip(self._places, self._longer, strict=True)):
            for index, place in enumerate(places):
                if not place.inserted or self._short.storages[place.token][0]:
                    continue
                width = self._events.periods[place.period].width
                before, birth, after = (
                    places[tokens.births[tokens.owners[other]]] for other in (index - width, index, index + width)
                )
                # the first or last repetition may refer to what is in no period
                steps = [
                    second.repetition - first.repetition
                    for first, second in ((before, birth), (birth, after))
                    if self._is_same(first, second)
                ]
                in_run = birth.period >= 0 and self._events.periods[birth.period].run == run
                step = steps[0] if steps else 0
                if not steps or set(steps) != {step} or abs(step) != int(in_run):
                    raise NotRepeatedError
                births[place.token] = birth, step
        return births

    def _is_same(self, first: Place, second: Place) -> bool:
        """Return whether two places are the same but for the repetition."""
        if first.period < 0 or first.period != second.period:
            return first == second
        period = self._events.periods[first.period]
        return (first.token - second.token) % period.width == 0

    def _birth(self, place: Place, more: Sequence[int]) -> tuple[int, int]:
        """Return (index in the shorter trace, inserted repetition or -1) of the allocation of a token's storage."""
        if not place.inserted:
            birth, run = self._moving[place.token]
            if birth.period < 0:
                return birth.token, -1
            return self._events.index_of(birth, birth.repetition + (more[run] if run >= 0 else 0), more)
        copy = place.repetition - self._events.periods[place.period].half
        if place.token not in self._repeated:
            return place.token, copy
        birth, step = self._repeated[place.token]
        if not step:
            return birth.token, -1
        added = more[self._events.periods[place.period].run]
        repetition = birth.repetition + (copy if step > 0 else added - 1 - copy)
        return self._events.index_of(birth, repetition, more)

    def _inserted_slots(self) -> dict[int, tuple[int, int, int]]:
        """Return (slot, its growth with a block, its growth with a copy) of each cost before a cut that has a slot."""
        slots: dict[int, tuple[int, int, int]] = {}
        for ones, tokens in zip(self._ones, self._longer, strict=True):
            for index, place in enumerate(self._costs.places(ones)):
                slot = tokens.trace.costs[index].slot
                if place.inserted and slot != -1:
                    before = tokens.trace.costs[index - self._costs.periods[place.period].width].slot
                    slots[place.token] = slot, before - self._short.trace.costs[place.token].slot, slot - before
        return slots

    def _grown_costs(self, more: Sequence[int], costs: Sequence[Cost]) -> Iterator[Cost]:
        tables = self._flops, self._bytes, self._slots
        growing = set().union(*tables)
        for place in self._costs.places(more):
            cost = costs[place.token]
            if not place.inserted:
                if place.token in growing:
                    flops, size, slot = (_dot(more, table.get(place.token, ())) for table in tables)
                    cost = cost._replace(flops=cost.flops + flops, bytes=cost.bytes + size, slot=cost.slot + slot)
            elif place.token in self._repeated_slots:
                period = self._costs.periods[place.period]
                slot, with_block, with_copy = self._repeated_slots[place.token]
                copy = place.repetition - period.half
                cost = cost._replace(slot=slot + (more[period.run] - 1) * with_block + copy * with_copy)
            yield cost

    def _check(self, tokens: _Tokens) -> None:
        """Check that a trace of another micro-batch repeats the same periods.

        Raises:
            NotRepeatedError: it doesn't.
        """
        short, other = self._short, tokens
        kinds = [
            [(*token[:3], owner) for token, owner in zip(t.storages, t.owners, strict=True)] for t in (short, other)
        ]
        streams = [[(cost.dtype, cost.stream, cost.slot) for cost in t.trace.costs] for t in (short, other)]
        same = kinds[0] == kinds[1] and streams[0] == streams[1] and short.ends == other.ends
        if not same or _setting(short) != _setting(other) or short.trace.sizes != other.trace.sizes:
            raise NotRepeatedError
        if any(self._grown(lambda t: t.host_bytes)) and short.trace.host_bytes != other.trace.host_bytes:
            raise NotRepeatedError
        costs, others = short.costs, other.costs
        if any(short.storages[index] != other.storages[index] for index in self._sums) or any(
            costs[index] != others[index] for index in {*self._flops, *self._bytes}
        ):
            raise NotRepeatedError
        for stretch, sequence in ((self._events, other.storages), (self._costs, others)):
            for period in stretch.periods:
                end = period.start + period.width * period.repeats
                if sequence[period.start : end - period.width] != sequence[period.start + period.width : end]:
                    raise NotRepeatedError


def equal_traces(first: Trace, second: Trace) -> bool:
    """Return whether two traces are the same, but for the numbers of storages."""
    same = all(getattr(first, name) == getattr(second, name) for name in ("phases", "costs", "steps", "host_bytes"))
    logs = [canonical(trace.log, trace.phases) for trace in (first, second)]
    return same and logs[0] == logs[1] and (first.sizes, first.assumptions) == (second.sizes, second.assumptions)


def _parts(
    every: Sequence[_Tokens],
    sequence: Callable[[_Tokens], Sequence[Any]],
    ends: Callable[[_Tokens], Sequence[int]] | None = None,
) -> tuple[Sequence[Any], list[Sequence[Any]], list[Sequence[int]]]:
    """Return the arguments of a `Stretch`; without ``ends`` the sequences have one part."""
    short, *longer = (sequence(tokens) for tokens in every)
    limits = [ends(tokens) if ends is not None else [len(sequence(tokens))] for tokens in every]
    return short, longer, limits


def _alike(count: int) -> Callable[[Any, Any], bool]:
    """Return a function that returns whether two tokens may be sums over blocks, equal in their first values."""

    def alike(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
        numbers = list(zip(first[count:], second[count:], strict=True))
        return first[:count] == second[:count] and all(abs(a) <= abs(b) and bool(a) == bool(b) for a, b in numbers)

    return alike


def _setting(tokens: _Tokens) -> tuple[Any, ...]:
    """Return the names of phases, the phases that end a step, and the assumptions."""
    trace = tokens.trace
    begins = [cost for _, cost, _ in trace.phases]
    steps = [[number for number, begin in enumerate(begins) if begin == step] for step in trace.steps]
    if not all(steps):
        raise NotRepeatedError
    return [name for _, _, name in trace.phases], steps, trace.assumptions


def _dot(more: Sequence[int], growth: Sequence[int]) -> int:
    return sum(first * second for first, second in zip(more, growth, strict=False))
