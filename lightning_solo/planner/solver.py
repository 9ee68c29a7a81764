"""Choose for each block what it keeps for backward, and how much of states and weights stays on the device.

Pure arithmetic on tables: bytes and seconds of each call of a block in each mode. `evaluate` says what a choice takes,
and `solve` returns the fastest choice that fits: by HiGHS, if `highspy` is installed, else by a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import ceil
from typing import Any

import numpy as np

from lightning_solo.errors import BudgetError
from lightning_solo.machine import is_installed
from lightning_solo.units import format_bytes

FORWARD, BACKWARD, STEP = PHASES = ("forward", "backward", "step")
UP, DOWN = "up", "down"  # to the device, to the host
PRICE = 1e-4  # of a step, for changing all blocks: of two equal plans the simpler one is taken
GAP = 5e-3  # of the seconds, within which the solver stops
_PARTS = 4  # a movable is tried in steps of a quarter
_ROUNDING = 1e-8  # of the budget, which HiGHS may exceed by the tolerance of floating-point numbers
_NO_COPIES = 1e6  # weight of copies' seconds with which blocks copy nothing if they can keep less otherwise
_PAIRS = 8  # most blocks of which two are changed at once
NODES = 500  # of HiGHS's tree, after which it has a choice, if not a proof; a limit in seconds wouldn't repeat


@dataclass(frozen=True)
class Option:
    """A call of a block in one mode.

    Attributes:
        kept: device bytes that stay from its forward to its backward.
        forward: most bytes of its forward, above those at its beginning.
        backward: most bytes of its backward, above the problem's ``base`` and what it and earlier calls keep.
        forward_s, backward_s: seconds of its operators, until those of the next call.
        copied: bytes that go to the host in its forward, and come back in its backward.
    """

    kept: int
    forward: int
    backward: int
    forward_s: float
    backward_s: float
    copied: int = 0


@dataclass(frozen=True)
class Call:
    """A call of a block; all calls of a block have the same mode. ``options`` has the plainest mode first."""

    block: str
    options: Mapping[str, Option]


@dataclass(frozen=True)
class Movable:
    """Bytes of which any part may be on the host, such as optimizer states.

    Attributes:
        bytes: all of them.
        buffers: bytes on the device through which they pass, if a part is on the host.
        passes: (phase, direction) -> number of times that each byte on the host passes the bus in a step.
        is_whole: whether all of them or none are on the host.
    """

    bytes: int
    buffers: int = 0
    passes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    is_whole: bool = False


@dataclass(frozen=True)
class Problem:
    """Tables of a module's step.

    Attributes:
        calls: calls of blocks, in the order of forward.
        order: numbers of calls, in the order of backward. A call without a backward is missing.
        base: device bytes before the first call, if nothing is on the host.
        between: most bytes from the end of the last call to backward, above the base and what calls keep.
        step: most device bytes in the optimizer step, if nothing is on the host.
        other_s: phase -> seconds of its operators outside blocks.
        budget: device bytes.
        host: bytes of the host; None if they aren't limited.
        movables: by name.
        bandwidth: bytes per second of the bus, in each direction.
        exposed: mode or movable -> seconds for each of its bytes on the host, in which operators wait for its copies.
    """

    calls: Sequence[Call]
    order: Sequence[int]
    base: int
    between: int
    step: int
    other_s: Mapping[str, float]
    budget: int
    host: int | None = None
    movables: Mapping[str, Movable] = field(default_factory=dict)
    bandwidth: float = 1e12
    exposed: Mapping[str, float] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """The modes of each block, in the order of first calls."""
        return {call.block: tuple(call.options) for call in self.calls}


@dataclass(frozen=True)
class Choice:
    """A choice, and what it takes.

    Attributes:
        modes: block -> mode.
        away: movable -> bytes on the host.
        peak: device bytes.
        host: bytes on the host.
        seconds: of a step.
    """

    modes: Mapping[str, str]
    away: Mapping[str, int]
    peak: int
    host: int
    seconds: float


class _Tables:
    """A problem's numbers as arrays: rows are calls, columns the modes that any block has."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = list(problem.options)
        self.modes = list(dict.fromkeys(mode for modes in problem.options.values() for mode in modes))
        number = {block: index for index, block in enumerate(self.blocks)}
        self.block_of = np.array([number[call.block] for call in problem.calls], dtype=int)
        self.allowed = np.array([[mode in modes for mode in self.modes] for modes in problem.options.values()])
        self.order = np.array(problem.order, dtype=int)
        self.kept, self.forward, self.backward, self.copied = (
            self._array(name) for name in ("kept", "forward", "backward", "copied")
        )
        self.forward_s, self.backward_s = self._array("forward_s"), self._array("backward_s")
        self.waits = self.copied * np.array([problem.exposed.get(mode, 0.0) for mode in self.modes])
        self.mode_s = self.forward_s + self.backward_s + self.waits
        self.rows = np.arange(len(problem.calls))
        self.prices = self._prices()
        self.groups = _equal_blocks(self)

    def _array(self, name: str) -> Any:
        return np.array(
            [
                [getattr(call.options[mode], name) if mode in call.options else 0 for mode in self.modes]
                for call in self.problem.calls
            ],
            dtype=float,
        )

    def peak(self, columns: Any, away: Mapping[str, float]) -> float:
        """Return the peak on the device; ``columns`` has the mode's number of each block."""
        problem, at = self.problem, (self.rows, columns[self.block_of])
        kept = self.kept[at]
        base = problem.base + self.moved(away)
        until = np.cumsum(kept)
        forward = base + until - kept + self.forward[at]
        alive = np.cumsum(kept[self.order][::-1])[::-1]
        backward = base + alive + self.backward[at][self.order]
        rest = (base + float(kept.sum()) + problem.between, problem.step + base - problem.base)
        return float(max(forward.max(initial=0), backward.max(initial=0), *rest))

    def moved(self, away: Mapping[str, float]) -> float:
        """Return the change of the base."""
        return sum(self.problem.movables[name].buffers - size for name, size in away.items() if size)

    def host(self, columns: Any, away: Mapping[str, float]) -> float:
        """Return the bytes on the host."""
        return float(self.copied[self.rows, columns[self.block_of]].sum() + sum(away.values()))

    def seconds(self, columns: Any, away: Mapping[str, float]) -> float:
        """Return the seconds of a step: waits, and in each phase the longest of operators and copies per direction."""
        problem, at = self.problem, (self.rows, columns[self.block_of])
        copied = float(self.copied[at].sum())
        total = float(self.waits[at].sum()) + sum(size * problem.exposed.get(name, 0.0) for name, size in away.items())
        for phase in PHASES:
            computed = problem.other_s.get(phase, 0.0)
            if phase != STEP:
                computed += float((self.forward_s if phase == FORWARD else self.backward_s)[at].sum())
            links = {(FORWARD, DOWN): copied, (BACKWARD, UP): copied}
            copies = [
                links.get((phase, way), 0.0)
                + sum(size * problem.movables[name].passes.get((phase, way), 0) for name, size in away.items())
                for way in (UP, DOWN)
            ]
            total += max(computed, *(size / problem.bandwidth for size in copies))
        return total

    def cost(self, columns: Any, away: Mapping[str, float]) -> float:
        """Return the seconds, and a small price of changed blocks, more of later ones, whose memory is free first."""
        return self.seconds(columns, away) + float(self.prices[np.arange(len(columns)), columns].sum())

    def _prices(self) -> Any:
        """Return the price of each block's modes, in seconds: none of the plainest, most of the last."""
        count = len(self.blocks)
        plain = PRICE * self.seconds(np.argmax(self.allowed, axis=1), {}) / count
        by_mode = np.arange(len(self.modes)) + np.arange(len(self.modes)).astype(bool) * len(self.modes)
        return plain * np.outer(1 + np.arange(count) / count, by_mode / max(by_mode.max(), 1))

    def rank(self, columns: Any, away: Mapping[str, float]) -> tuple[int, float]:
        """Return the missing bytes and the cost, which order choices."""
        return sum(self.missing(columns, away)), self.cost(columns, away)

    def choice(self, columns: Any, away: Mapping[str, float]) -> Choice:
        """Return a choice with what it takes."""
        modes = {block: self.modes[column] for block, column in zip(self.blocks, columns, strict=True)}
        whole = {name: min(ceil(size), self.problem.movables[name].bytes) for name, size in away.items()}
        peak, host = self.peak(columns, whole), self.host(columns, whole)
        return Choice(modes, whole, round(peak), round(host), self.seconds(columns, whole))

    def fits(self, columns: Any, away: Mapping[str, float]) -> bool:
        """Return whether a choice fits."""
        return self.missing(columns, away) == (0, 0)

    def missing(self, columns: Any, away: Mapping[str, float]) -> tuple[int, int]:
        """Return the bytes by which a choice exceeds the device and the host."""
        problem = self.problem
        host = 0.0 if problem.host is None else self.host(columns, away) - problem.host
        return max(0, round(self.peak(columns, away) - problem.budget)), max(0, round(host))


def evaluate(problem: Problem, modes: Mapping[str, str], away: Mapping[str, int] | None = None) -> Choice:
    """Return what a choice takes.

    Args:
        problem: the tables.
        modes: block -> mode.
        away: movable -> bytes on the host; none by default.
    """
    tables = _Tables(problem)
    columns = np.array([tables.modes.index(modes[block]) for block in tables.blocks], dtype=int)
    return tables.choice(columns, away or {})


def corrected(problem: Problem, choice: Choice, seconds: float) -> Problem:
    """Return the problem in which a choice takes ``seconds``: the difference is shared by its bytes on the host."""
    copied = dict.fromkeys(choice.modes.values(), 0)
    for call in problem.calls:
        copied[choice.modes[call.block]] += call.options[choice.modes[call.block]].copied
    copied |= choice.away
    if not (total := sum(copied.values())):
        return problem
    more = (seconds - choice.seconds) / total
    known = problem.exposed
    return replace(
        problem, exposed={**known, **{name: max(known.get(name, 0.0) + more, 0.0) for name in copied if copied[name]}}
    )


def solve(problem: Problem, *, highs: bool | None = None) -> Choice:
    """Return the fastest choice that fits.

    Args:
        problem: the tables.
        highs: whether to use HiGHS; by default if `highspy` is installed.

    Raises:
        BudgetError: no choice fits; names the missing bytes.
    """
    tables = _Tables(problem)
    choice = _chosen(tables, highs)
    if choice is not None:
        return choice
    nearest = closest(problem, highs=highs)
    device, host = _missing(problem, nearest)
    words = [
        f"{format_bytes(size)} {place}" for size, place in ((device, "on the device"), (host, "on the host")) if size
    ]
    needed, available = (nearest.peak, problem.budget) if device else (nearest.host, problem.host or 0)
    raise BudgetError(f"no choice for the blocks fits: it lacks {' and '.join(words)}", needed, available)


def closest(problem: Problem, *, highs: bool | None = None) -> Choice:
    """Return the choice that lacks least bytes; arguments are those of `solve`."""
    tables = _Tables(problem)
    found = _by_highs(tables, shortage=True) if _has_highs(highs) else None
    return tables.choice(*(found or _by_search(tables)))


def _chosen(tables: _Tables, highs: bool | None) -> Choice | None:
    """Return the fastest choice that fits, or None; HiGHS improves the choice that a search finds."""
    found = _by_search(tables)
    if _has_highs(highs):
        found = min(filter(None, (found, _by_highs(tables))), key=lambda each: tables.rank(*each))
    return tables.choice(*_spread(tables, *found)) if tables.fits(*found) else None


def _spread(tables: _Tables, columns: Any, away: Mapping[str, float]) -> tuple[Any, Mapping[str, float]]:
    """Return the choice with blocks that copy evenly among the others, if it is as good.

    Between two that copy, the bus has time for their copies. The bytes by which its peak is higher go to the host.
    """
    copies = tables.copied.any(axis=0)[columns]
    count, moved = len(columns), int(copies.sum())
    places = [number for number in range(count) if (number + 1) * moved // count > number * moved // count]
    spread = np.empty_like(columns)
    spread[places] = columns[copies]
    spread[[number for number in range(count) if number not in places]] = columns[~copies]
    allowed = tables.allowed[np.arange(count), spread].all()
    sent = _sent_away(tables, spread, away)
    most = (1 + PRICE) * tables.seconds(columns, away)
    is_good = allowed and tables.fits(spread, sent) and tables.seconds(spread, sent) <= most
    return (spread, sent) if is_good else (columns, away)


def _has_highs(highs: bool | None) -> bool:
    return is_installed("highspy") if highs is None else highs


def _missing(problem: Problem, choice: Choice) -> tuple[int, int]:
    host = 0 if problem.host is None else choice.host - problem.host
    return max(0, choice.peak - problem.budget), max(0, host)


# --- by HiGHS ---


class _Program:
    """A mixed-integer linear program under construction; rows are ``sum(coefficients) <= upper``."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.whole: list[int] = []
        self.rows: list[tuple[float, float, dict[int, float]]] = []

    def variable(self, cost: float = 0.0, upper: float = float("inf"), *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        if whole:
            self.whole.append(len(self.cost) - 1)
        return len(self.cost) - 1

    def at_most(self, terms: Mapping[int, float], upper: float) -> None:
        self.rows.append((-float("inf"), upper, dict(terms)))

    def equal(self, terms: Mapping[int, float], value: float) -> None:
        self.rows.append((value, value, dict(terms)))

    def solved(self) -> Any:
        """Return the values of the variables, or None if there is no solution."""
        import highspy

        class Silent(highspy.Highs):
            """HiGHS, whose constructor prints a banner before options can be set."""

            def enableCallbacks(self) -> None:
                self.silent()
                super().enableCallbacks()  # type: ignore[no-untyped-call]

        solver: Any = Silent()  # type: ignore[no-untyped-call]
        options: dict[str, Any] = {
            "mip_rel_gap": GAP,
            "mip_max_nodes": NODES,
            "random_seed": 0,
            "threads": 1,
            "primal_feasibility_tolerance": 1e-9,
            "mip_feasibility_tolerance": 1e-9,
        }
        for name, value in options.items():
            solver.setOptionValue(name, value)
        count = len(self.cost)
        solver.addVars(count, np.zeros(count), np.array(self.upper))
        solver.changeColsCost(count, np.arange(count, dtype=np.int32), np.array(self.cost))
        kinds = np.full(len(self.whole), highspy.HighsVarType.kInteger)
        solver.changeColsIntegrality(len(self.whole), np.array(self.whole, dtype=np.int32), kinds)
        for lower, upper, terms in self.rows:
            columns, values = np.array(list(terms), dtype=np.int32), np.array(list(terms.values()))
            solver.addRow(lower, upper, len(terms), columns, values)
        solver.run()
        if solver.getInfo().primal_solution_status != 2:  # kSolutionStatusFeasible
            return None
        return np.array(solver.getSolution().col_value)


def _by_highs(tables: _Tables, *, shortage: bool = False) -> tuple[Any, dict[str, float]] | None:
    program, chosen, away = _program(tables, shortage=shortage)
    values = program.solved()
    if values is None:
        return None
    columns = np.zeros(len(tables.blocks), dtype=int)
    for blocks, options in chosen:
        columns[blocks] = np.repeat([*options], [round(values[variable]) for variable in options.values()])
    unit = _unit(tables.problem)
    return columns, {name: float(values[each] * unit) for name, each in away.items() if values[each] * unit >= 1}


def _unit(problem: Problem) -> float:
    """Return the bytes in which the program counts, so that its numbers are near 1."""
    return float(max(problem.budget, problem.base, 1))


def _equal_blocks(tables: _Tables) -> list[list[int]]:
    """Return the blocks, those together that have equal options and are called once, one after the other.

    In backward they come one after the other too, while no more is kept than that of the calls before them.
    """
    calls = tables.problem.calls
    counts = np.bincount(tables.block_of, minlength=len(tables.blocks))
    turns = {number: turn for turn, number in enumerate(reversed(tables.problem.order))}
    groups: list[list[int]] = []
    before: int | None = None
    latest = -1
    for number, call in enumerate(calls):
        block = int(tables.block_of[number])
        is_single = counts[block] == 1 and turns.get(number) == number == latest + 1
        latest = max(latest, turns.get(number, len(calls)))
        if is_single and before is not None and dict(call.options) == dict(calls[before].options):
            groups[-1].append(block)
            before = number
            continue
        if not any(block in group for group in groups):
            groups.append([block])
        before = number if is_single else None
    return groups


def _program(
    tables: _Tables, *, shortage: bool
) -> tuple[_Program, list[tuple[list[int], dict[int, int]]], dict[str, int]]:
    """Return the program, the blocks and variables of modes of each group, and the variables of movables.

    A group of equal blocks has the number of blocks of each mode. Its first blocks take the modes with the highest
    peaks above what is kept (Jackson's rule), so a peak is that of the last block of a mode.

    Args:
        tables: the problem.
        shortage: whether to find the least missing bytes instead of the least seconds.
    """
    problem, program = tables.problem, _Program()
    unit, time = _unit(problem), 0.0 if shortage else 1.0
    lacks = [program.variable(1.0, float("inf") if shortage else 0.0) for _ in range(2)]  # on the device, on the host
    chosen: list[tuple[list[int], dict[int, int]]] = []
    options_of: dict[int, dict[int, int]] = {}  # by call; of a group by its first call
    used: dict[int, dict[int, int]] = {}  # first call of a group -> mode -> whether a block has it
    for blocks in tables.groups:
        number, calls = blocks[0], np.flatnonzero(tables.block_of == blocks[0])
        first, options = int(calls[0]), dict[int, int]()
        above = np.maximum(tables.backward[first], tables.forward[first] - tables.kept[first])
        modes = map(int, np.flatnonzero(tables.allowed[number]))
        for mode in sorted(modes, key=lambda mode: -float(above[mode])):
            seconds = tables.mode_s[calls, mode].sum() + tables.prices[blocks, mode].mean()
            options[mode] = program.variable(time * float(seconds), float(len(blocks)), whole=True)
        program.equal(dict.fromkeys(options.values(), 1.0), float(len(blocks)))
        chosen.append((blocks, options))
        options_of |= dict.fromkeys(calls, options)
        if len(blocks) > 1:
            used[first] = {mode: program.variable(0.0, 1.0, whole=True) for mode in options}
            for mode, variable in options.items():
                program.at_most({variable: 1.0, used[first][mode]: -float(len(blocks))}, 0.0)
    represented = [call for call in range(len(problem.calls)) if call in options_of]

    away: dict[str, int] = {}
    base: dict[int, float] = {}
    for name, movable in problem.movables.items():
        away[name] = program.variable(time * problem.exposed.get(name, 0.0) * unit, movable.bytes / unit)
        any_away = program.variable(0.0, 1.0, whole=True)
        row = {away[name]: 1.0, any_away: -movable.bytes / unit}
        (program.equal if movable.is_whole else program.at_most)(row, 0.0)
        base[away[name]], base[any_away] = -1.0, movable.buffers / unit

    def terms(table: Any, call: int) -> Iterator[tuple[int, float]]:
        for mode, variable in options_of[call].items():
            if value := table[call, mode]:
                yield variable, float(value)

    def memory(calls: Iterable[tuple[int, float]], room: float) -> None:
        row = {lacks[0]: -1.0, **base}
        for variable, value in calls:
            row[variable] = row.get(variable, 0.0) + value / unit
        program.at_most(row, room / unit)

    def total(alive: int | None) -> list[tuple[int, float]]:
        return [] if alive is None else [(alive, unit)]

    def after(alive: int | None, call: int) -> int:
        """Return a variable for the kept bytes, with those of a call."""
        total = program.variable()
        row = {total: -1.0, **({} if alive is None else {alive: 1.0})}
        for variable, value in terms(tables.kept, call):
            row[variable] = value / unit
        program.equal(row, 0.0)
        return total

    def peaks(alive: int | None, call: int, above: Any) -> None:
        """Limit the peaks of a call, or of the last block of each mode in a group; ``above`` is above what is kept."""
        kept = []
        for mode, variable in options_of[call].items():
            kept.append((variable, float(tables.kept[call, mode])))
            if call in used:
                memory([*total(alive), *kept, (used[call][mode], float(above[call, mode]))], room)
        if call not in used:
            memory([*total(alive), *terms(tables.kept + above, call)], room)

    budget = problem.budget * (1 - _ROUNDING)
    room = budget - problem.base
    alive: int | None = None
    for call in represented:
        peaks(alive, call, tables.forward - tables.kept)
        alive = after(alive, call)
    memory(total(alive), room - problem.between)
    alive = None
    for call in reversed(problem.order):
        if call in options_of:
            peaks(alive, call, tables.backward)
            alive = after(alive, call)
    memory([], budget - problem.step)
    copied = [term for call in represented for term in terms(tables.copied, call)]
    if problem.host is not None:
        row = {lacks[1]: -1.0, **dict.fromkeys(away.values(), 1.0)}
        for variable, value in copied:
            row[variable] = row.get(variable, 0.0) + value / unit
        program.at_most(row, problem.host / unit)

    exposed = {phase: program.variable(time) for phase in PHASES}  # seconds of copies beyond those of operators
    for phase, way in product(PHASES, (UP, DOWN)):
        row = {
            away[name]: passes * unit / problem.bandwidth
            for name, each in problem.movables.items()
            if (passes := each.passes.get((phase, way), 0))
        }
        if (phase, way) in ((FORWARD, DOWN), (BACKWARD, UP)):
            for variable, value in copied:
                row[variable] = row.get(variable, 0.0) + value / problem.bandwidth
        if not row:
            continue
        row[exposed[phase]] = -1.0
        table = {FORWARD: tables.forward_s, BACKWARD: tables.backward_s}.get(phase)
        for call in represented if table is not None else ():
            for variable, value in terms(table, call):
                row[variable] = row.get(variable, 0.0) - value
        program.at_most(row, problem.other_s.get(phase, 0.0))
    return program, chosen, away


# --- by a search ---


_Move = tuple[list[int], int | None, int]
"""Equal blocks, the mode that one of them has, None for any, and the mode that it gets."""


def _by_search(tables: _Tables) -> tuple[Any, dict[str, float]]:
    """Return the best choice of a search by a price per byte, improved block by block; if none fits, the nearest.

    Under a price, each block takes the mode that is cheapest in seconds and bytes. The least price that fits gives a
    choice for equal and unequal blocks alike; then single blocks take a faster mode as long as it fits.
    """
    problem = tables.problem
    shares = [
        [size / parts * each.bytes for size in range(parts + 1)]
        for each in problem.movables.values()
        for parts in (1 if each.is_whole else _PARTS,)
    ]
    starts: list[tuple[Any, dict[str, float]]] = []
    for sizes in product(*shares):
        away = {name: size for name, size in zip(problem.movables, sizes, strict=True) if size}
        for weight in (0.0, 1.0, _NO_COPIES) if tables.copied.any() else (0.0,):
            columns = _priced(tables, away, weight)
            starts.append((columns, _sent_away(tables, columns, away)))
    # from the best start, and from the best with most on the host, which leaves room for faster modes
    most = max((sum(away.values()) for _, away in starts), default=0.0)
    roomy = [start for start in starts if sum(start[1].values()) == most]
    best = [min(each, key=lambda start: tables.rank(*start)) for each in (starts, roomy)]
    ends = [(_improved(tables, *start), start[1]) for start in best]
    columns, away = min(ends, key=lambda each: tables.rank(*each))
    return columns, _brought_back(tables, columns, away)


def _priced(tables: _Tables, away: Mapping[str, float], weight: float) -> Any:
    """Return the modes under the least price per byte that fits, or those that keep least if none does."""
    blocks = range(len(tables.blocks))

    def summed(table: Any) -> Any:
        return np.array([table[tables.block_of == block].sum(axis=0) for block in blocks])

    seconds = summed(tables.mode_s) + weight * 2 * summed(tables.copied) / tables.problem.bandwidth
    seconds = np.where(tables.allowed, seconds, np.inf)
    kept = summed(tables.kept)
    ratios = {0.0}
    for block in blocks:
        modes = np.flatnonzero(tables.allowed[block])
        for one, other in product(modes, modes):
            if kept[block, one] > kept[block, other]:
                ratio = (seconds[block, other] - seconds[block, one]) / (kept[block, one] - kept[block, other])
                ratios.add(max(float(ratio) * (1 + 1e-9), 0.0))
    prices = sorted(ratios)

    def at(price: float) -> Any:
        return np.argmin(np.where(tables.allowed, seconds + price * kept, np.inf), axis=1)

    low, high = 0, len(prices) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if tables.fits(at(prices[middle]), away) else (middle + 1, high)
    return at(prices[low])


def _improved(tables: _Tables, columns: Any, away: Mapping[str, float]) -> Any:
    """Return a choice that no other mode of a block improves, from the last on; with few groups, of two blocks."""
    rank = tables.rank(columns, away)
    ones: list[tuple[_Move, ...]] = []
    for blocks in reversed(tables.groups):
        modes = [int(mode) for mode in np.flatnonzero(tables.allowed[blocks[0]])]
        befores: list[int | None] = [*modes] if len(blocks) > 1 else [None]
        for before, mode in product(befores, modes):
            ones.append(((blocks, before, mode),))
    twos = [one + other for one, other in combinations(ones, 2)] if len(tables.groups) <= _PAIRS else []
    for changes in (ones, twos, ones):
        improved = True
        while improved:
            improved = False
            for change in changes:
                other = _changed(tables, columns, change)
                if other is not None and (now := tables.rank(other, away)) < rank:
                    columns, rank, improved = other, now, True
    return columns


def _changed(tables: _Tables, columns: Any, change: tuple[_Move, ...]) -> Any:
    """Return a choice after a change of one or two blocks; None if no block has the mode before."""
    columns = columns.copy()
    for blocks, before, mode in change:
        places = [block for block in blocks if before is None or columns[block] == before]
        if not places or before == mode:
            return None
        columns[places[-1]] = mode
    return columns


def _sent_away(tables: _Tables, columns: Any, away: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes on the host after as many as the device lacks have gone there, if the host has room."""
    sent = dict(away)
    for name, movable in tables.problem.movables.items():
        device, host = tables.missing(columns, sent)
        if not device or host or not sent.get(name) or movable.is_whole:
            continue
        more = {**sent, name: min(sent[name] + device, movable.bytes)}
        sent = more if tables.missing(columns, more)[1] == 0 else sent
    return sent


def _brought_back(tables: _Tables, columns: Any, away: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes on the host after as many as fit have come back to the device."""
    left = dict(away)
    for name in left:
        room = max(tables.problem.budget - tables.peak(columns, left), 0.0)
        if not tables.problem.movables[name].is_whole or room >= left[name]:
            left[name] = max(left[name] - room, 0.0)
    return {name: size for name, size in left.items() if size}
