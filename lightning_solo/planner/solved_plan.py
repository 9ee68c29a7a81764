"""The solved plan: a preset whose blocks each keep, recompute or move what is fastest within the budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from math import inf
from types import MappingProxyType

from lightning_solo.cards.blocks import HOST_INPUT, KEEP, KEEP_PRODUCTS, MODES, OFFLOAD, RECOMPUTE
from lightning_solo.cards.card import resources
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import BudgetError, PlanError, SoloError
from lightning_solo.planner.bases import (
    BLOCK_MICRO_BATCHES,
    SOLVED,
    STATES,
    WEIGHTS,
    Bases,
    settings_of,
    technique_for,
    with_modes,
    with_settings,
)
from lightning_solo.planner.block_tables import BlockTable, block_table, problem_of
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.device import CPU
from lightning_solo.planner.fake_modules import empty_parameters
from lightning_solo.planner.forks import run_in_forks
from lightning_solo.planner.micro_batch_sizes import ScaledTraces, divided, is_divisible, sizes_below
from lightning_solo.planner.plan import NEAR, TIGHT, VERDICTS, Plan, as_fast, with_host_memory
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import Arrangement, arrange
from lightning_solo.planner.solver import (
    BACKWARD,
    DOWN,
    FORWARD,
    GAP,
    STEP,
    UP,
    Choice,
    Movable,
    Problem,
    closest,
    corrected,
    evaluate,
    solve,
)
from lightning_solo.presets.writing import fields_of
from lightning_solo.units import format_bytes

ROUNDS = 3  # in which the traced plan's difference from the tables corrects the budget
ALL = 0.99  # of the bytes of slabs, which are padded: from here on no block's weights stay on the device
FIRST = "first states"  # those of weights before the first block, whose copies end backward: no operator hides them
PASSES = {
    STATES: {(BACKWARD, UP): 1, (BACKWARD, DOWN): 1},
    WEIGHTS: {(FORWARD, UP): 1, (BACKWARD, UP): 1, (BACKWARD, DOWN): 1},
}
"""Part that may be on the host -> number of times that each of its bytes passes the bus in a phase, per direction."""


def solved(planner: Planner, bases: Bases, plans: Mapping[str, Plan]) -> Plan:
    """Return the fastest plan of a few bases with solved modes of blocks; if none fits, the one that lacks least.

    A plan that leaves the reserve comes before a faster one that is tight.

    Args:
        planner: of the module.
        bases: presets to which modes may be added.
        plans: those of the bases, by name.

    Raises:
        PlanError: nothing can be solved: a base fits as it is in as little time, or no block can have a mode.
    """
    candidates = {name: plans[name] for name in bases.bases if name in plans}
    whole: list[Plan] = []
    in_parts: list[Plan] = []
    fixed = {name: _Solver(planner, bases.bases[name]).fixed(plan) for name, plan in candidates.items()}
    open_ones = {name: plan for name, plan in candidates.items() if sum(fixed[name].values()) <= planner.budget}
    names = _promising(open_ones)
    lacking = [name for name in names if with_host_memory(candidates[name], planner.host_memory).verdict != "fits"]
    reasons = [f"{name} fits as it is" for name in names if name not in lacking]
    reasons += [f"{name}: {_words(fixed[name], planner.budget)}" for name in candidates if name not in open_ones]
    for name in lacking:
        base, plan = bases.bases[name], candidates[name]
        try:
            whole.append(_Solver(planner, base).plan())
        except SoloError as error:
            reasons.append(f"{name}: {error}")
        if not bases.whole_batch and plan.largest_micro_batch is not None and is_divisible(planner, base):
            in_parts += _in_micro_batches(planner, base, _best([*whole, *in_parts]))
    best = _best([*whole, *in_parts])
    if lacking == names and (best is None or best.verdict != "fits") and not bases.whole_batch:
        for name in reversed(names):  # first the one that needs least memory
            try:
                whole.append(_Solver(planner, bases.bases[name]).in_block_micro_batches())
            except SoloError as error:
                reasons.append(f"{name}: {error}")
            best = _best([*whole, *in_parts])
            if best is not None and best.verdict == "fits":
                break
    if best is None:
        raise PlanError("; ".join(reasons) or "no preset leaves the choice for the blocks open")
    undivided = _best(whole)
    if undivided is not None and undivided.fits and undivided.verdict == best.verdict and as_fast(undivided, best):
        best = undivided
    for name, plan in candidates.items():
        judged = with_host_memory(plan, planner.host_memory)
        no_worse = judged.fits and VERDICTS.index(judged.verdict) <= VERDICTS.index(best.verdict)
        if no_worse and plan.seconds_per_example <= best.seconds_per_example:
            how = "fits" if judged.verdict == "fits" else "fits tightly"
            raise PlanError(f"{name} {how} as it is, and no plan with other blocks takes less time")
    return best


def _words(fixed: Mapping[str, int], budget: int) -> str:
    """Return why a preset with these `fixed` bytes can't fit."""
    held = " and ".join(f"{format_bytes(size)} of {name.replace('_', ' ')}" for name, size in fixed.items())
    return f"{held} stay on the device, which has {format_bytes(budget)}"


def _best(plans: Sequence[Plan]) -> Plan | None:
    def order(plan: Plan) -> tuple[int, int, float]:
        return VERDICTS.index(plan.verdict), plan.missing_bytes, plan.seconds_per_example

    return min(plans, key=order, default=None)


def _in_micro_batches(planner: Planner, base: Configuration, best: Plan | None) -> list[Plan]:
    """Return the plan of the largest micro-batch that fits without changed blocks, and the best of larger ones.

    A smaller micro-batch takes more time, in kernels that are less busy, so none is faster than with all blocks kept.
    Both plans are left out if ``best``, a plan of whole batches, is as fast.
    """
    assert planner.micro_batch is not None
    traces = ScaledTraces(planner)
    least = best.seconds_per_example if best is not None and best.verdict == "fits" else inf
    larger: list[tuple[float, _Solver]] = []
    plans: list[Plan] = []
    for size in sizes_below(planner.micro_batch):
        solver = _Solver(planner, divided(base, size), size, traces)
        if not traces.at({KEEP: solver.base}, size):
            return []
        needed, seconds = solver.kept()
        if seconds < least and needed <= 0:
            least = seconds
            plans.append(solver.planned(solver.base))
            break
        larger.append((seconds, solver))
    solved: list[tuple[tuple[bool, float], _Solver]] = []
    for seconds, solver in larger:
        if seconds * (1 + NEAR) < least:
            with suppress(SoloError):
                solved.append((solver.promise(), solver))
    if solved:
        (lacks, seconds), solver = min(solved, key=lambda each: each[0])
        if (not lacks and seconds * (1 + NEAR) < least) or least == inf:
            plans.append(solver.plan())
    return plans


def _promising(plans: Mapping[str, Plan]) -> list[str]:
    """Return the fastest of the presets, and the one that needs least memory."""
    if not plans:
        return []
    fastest = min(plans, key=lambda name: plans[name].seconds_per_example)
    smallest = min(plans, key=lambda name: plans[name].needed_bytes)
    return list(dict.fromkeys((fastest, smallest)))


class _Solver:
    """Solves the modes of blocks for one base.

    Args:
        planner: of the module.
        base: the preset.
        size: examples in a micro-batch of the base; None if it runs whole batches.
        scaled: traces for all sizes.
    """

    def __init__(
        self,
        planner: Planner,
        base: Configuration,
        size: int | None = None,
        scaled: ScaledTraces | None = None,
    ) -> None:
        assert planner.micro_batch is not None
        self._planner, self.base, self._scaled = planner, base, scaled
        self._size = size or planner.micro_batch
        self._parts = -(-planner.micro_batch // self._size)
        self._without_launches = 1.0
        self._resident: Mapping[str, int] = {}  # bytes of each category, if all of them are on the device
        self._slabs = 0  # bytes of the host that the weights of all blocks take
        self._cuda = planner.device.name != CPU
        self._budget = int(planner.budget / (1 + TIGHT))
        # on a CPU the device's bytes are the host's, and moving them would gain nothing
        self._all_of_host = planner.host_memory if self._cuda else None
        self._host = None if self._all_of_host is None else int(self._all_of_host / (1 + TIGHT))

    def fixed(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of weights and states, by category, that stay on the device under any choice."""
        moved = self._moved(self.base)
        held = {"weights": WEIGHTS, "optimizer_states": STATES}
        return {name: size for name, by in held.items() if by not in moved and (size := plan.breakdown.get(name, 0))}

    def kept(self) -> tuple[int, float]:
        """Return the bytes that the base lacks or, below 0, leaves, and its seconds per example."""
        needed, seconds = self._costs(self.base, self._traces({KEEP: self.base})[KEEP])
        return needed - self._budget, seconds / (self._size * self._parts)

    def promise(self) -> tuple[bool, float]:
        """Return (False, seconds per example) of the best choice by the tables; (True, missing bytes) if none fits."""
        problem = self._problem()
        try:
            seconds = solve(problem).seconds / self._without_launches
            return False, seconds / (self._size * self._parts)
        except BudgetError as error:
            return True, error.needed - error.available

    def planned(self, config: Configuration) -> Plan:
        """Return the plan of a preset that was solved."""
        plan = with_host_memory(self._planner.plan(SOLVED, config), self._planner.host_memory)
        if self._scaled is not None:  # the plan of a size that doesn't fit is that of the largest that does
            config = with_settings(config, micro_batch=plan.micro_batch)
        return replace(plan, configuration=fields_of(config))

    def plan(self) -> Plan:
        """Return the plan of the best choice, traced as a whole; its differences from the tables correct them.

        If no choice leaves the reserve, the fastest that fits in all memory is planned.
        """
        problem = self._problem()
        tried: dict[str, tuple[Configuration, int, int, float]] = {}
        problem = self._solve_in_rounds(problem, tried)
        if all(self._lacks(needed, on_host) for _, needed, on_host, _ in tried.values()):
            self._solve_in_rounds(self._without_reserve(problem), tried)

        def rank(traced: tuple[Configuration, int, int, float]) -> tuple[int, float]:
            _, needed, on_host, seconds = traced
            return self._lacks(needed, on_host), seconds

        return self.planned(min(tried.values(), key=rank)[0])

    def _solve_in_rounds(self, problem: Problem, tried: dict[str, tuple[Configuration, int, int, float]]) -> Problem:
        """Add presets to ``tried``, with their traced bytes and seconds; return the problem that these correct."""
        for _ in range(ROUNDS):
            try:
                choice = solve(problem)
            except BudgetError:
                if tried:
                    break
                choice = closest(problem)
            config = self._configured(choice)
            fastest = min((seconds for _, *bytes_, seconds in tried.values() if not self._lacks(*bytes_)), default=inf)
            if repr(config) in tried or choice.seconds >= (1 - GAP) * self._without_launches * fastest:
                break  # the solver itself is no more exact
            trace = self._trace(config)
            needed, seconds = self._costs(config, trace)
            tried[repr(config)] = config, needed, trace.host_bytes, seconds
            problem = corrected(problem, choice, self._without_launches * seconds)
            problem = replace(
                problem,
                budget=self._budget - (needed - choice.peak),
                host=None if self._host is None else self._host - max(0, trace.host_bytes - choice.host),
            )
        return problem

    def _without_reserve(self, problem: Problem) -> Problem:
        """Let plans use the reserve, too, and return the problem with these larger budgets."""
        more = self._planner.budget - self._budget
        self._budget += more
        problem = replace(problem, budget=problem.budget + more)
        if self._host is None or self._all_of_host is None or problem.host is None:
            return problem
        more = self._all_of_host - self._host
        self._host += more
        return replace(problem, host=problem.host + more)

    def _lacks(self, needed: int, on_host: int) -> int:
        """Return how many bytes the device and the host lack together."""
        host = on_host if self._host is None else self._host
        return max(0, needed - self._budget) + max(0, on_host - host)

    def in_block_micro_batches(self) -> Plan:
        """Return the plan with the fewest micro-batches within blocks that fit, or with most if none do.

        All that a base can have on the host is there: weights pass the bus as often as for a whole batch, and tokens
        that don't fit otherwise take longer to compute than to copy.

        Raises:
            PlanError: the batch has one example.
            SoloError: the blocks can't run in micro-batches.
        """
        configs = [self._in_blocks(self._size // size) for size in sizes_below(self._size)]
        if not configs:
            raise PlanError("a batch of one example can't be divided within blocks")
        fewest = bisect_left(configs[:-1], True, key=self._fits)  # more micro-batches never take more memory
        return self.planned(configs[fewest])

    def _in_blocks(self, number: int) -> Configuration:
        added = [technique_for(BLOCK_MICRO_BATCHES, micro_batches=number)]
        if self._cuda:
            added.append(technique_for("moving"))
        config = replace(self.base, techniques=(*self.base.techniques, *added))
        for part in PASSES:
            config = self._moved(config).get(part, config)
        config.check()
        return config

    def _fits(self, config: Configuration) -> bool:
        trace = self._trace(config)
        return not self._lacks(self._costs(config, trace)[0], trace.host_bytes)

    # --- tables ---

    def _problem(self) -> Problem:
        """Return the tables of all modes, from a trace for each."""
        device = self._planner.device
        kept = self._trace(self.base) if self._scaled is None else self._traces({KEEP: self.base})[KEEP]
        names = list(dict.fromkeys(mark.block for mark in kept.marks))
        # a micro-batch keeps so little that none of it has to move
        moving = (HOST_INPUT, OFFLOAD) if self._cuda and self._scaled is None else ()
        modes = (KEEP_PRODUCTS, RECOMPUTE, *moving)
        configs = {mode: with_modes(self.base, {mode: names}) for mode in modes}
        configs |= self._moved(configs[RECOMPUTE])
        traces = self._traces(configs)
        tables, costs = {KEEP: self._table(kept)}, {KEEP: self._costs(self.base, kept)}
        for mode in traces.keys() & set(modes):
            table = self._table(traces[mode])
            if mode not in (HOST_INPUT, OFFLOAD) or any(option.copied for option in table.options):
                tables[mode], costs[mode] = table, self._costs(configs[mode], traces[mode])
        if len(tables) == 1:
            raise PlanError("no block can be recomputed")
        tables = {mode: tables[mode] for mode in MODES if mode in tables}
        problem = replace(problem_of(tables, self._budget, self._host), bandwidth=device.copy_speeds()[0])
        plain = evaluate(problem, dict.fromkeys(names, KEEP))
        # operators' seconds alone, against their schedule's, in which short ones wait for their launches
        self._without_launches = plain.seconds / costs[KEEP][1]
        # of the allocator's gaps the least: those of a device that holds everything are larger
        gaps = min(needed - evaluate(problem, dict.fromkeys(names, mode)).peak for mode, (needed, _) in costs.items())
        problem = replace(problem, budget=self._budget - gaps)

        def exposed(
            problem: Problem, mode: str, seconds: float, away: Mapping[str, int] = MappingProxyType({})
        ) -> float:
            """Return the seconds in which operators wait for copies."""
            planned = evaluate(problem, dict.fromkeys(names, mode), away).seconds
            return max(0.0, self._without_launches * seconds - planned)

        waits = {}
        for mode in tables.keys() & {HOST_INPUT, OFFLOAD}:
            waits[mode] = exposed(problem, mode, costs[mode][1]) / sum(option.copied for option in tables[mode].options)
        self._resident = kept.log.breakdown(len(kept.log.events))
        movables: dict[str, Movable] = {}
        for part in traces.keys() & PASSES.keys() if RECOMPUTE in tables else ():
            size = traces[part].host_bytes
            if not size:  # of parameters that are too small to leave
                continue
            self._slabs = size if part == WEIGHTS else self._slabs
            gone = tables[RECOMPUTE].base - self._table(traces[part]).base
            movable = Movable(size, max(0, size - gone), self._passes(part))
            alone = replace(problem, movables={part: movable})
            waited = exposed(alone, RECOMPUTE, self._costs(configs[part], traces[part])[1], {part: size})
            first = int(size * self._share_before(names)) if part == STATES else 0
            if first:
                movables[FIRST] = Movable(first, 0, movable.passes, is_whole=True)
                waits[FIRST] = waited / first
            else:
                waits[part] = waited / size
            movables[part] = replace(movable, bytes=size - first)
        return replace(problem, movables=movables, exposed=waits)

    def _share_before(self, names: Sequence[str]) -> float:
        """Return the share of trained weights before the first block's, and 1 % more, as slabs are padded."""
        with empty_parameters():
            module = self._planner.make()
        of_blocks = {id(p) for name in names for p in module.get_submodule(name).parameters()}
        trained = [p for p in module.parameters() if p.requires_grad]
        first = sum(p.numel() for p in takewhile(lambda p: id(p) not in of_blocks, trained))
        share: float = first / sum(p.numel() for p in trained)
        return min(1.01 * share, 1.0)

    def _passes(self, part: str) -> Mapping[tuple[str, str], int]:
        """Return how often each byte on the host passes the bus; released gradients are stepped in backward."""
        return PASSES[part] if self._releases else {(STEP, UP): 1, (STEP, DOWN): 1}

    @property
    def _releases(self) -> bool:
        freed = (resources(chosen.card.frees, chosen.settings) for chosen in self.base.techniques)
        return any("gradients" in each for each in freed)

    def _moved(self, config: Configuration) -> dict[str, Configuration]:
        """Return the presets with all optimizer states, or all blocks' weights, on the host, where that is possible."""
        if not self._cuda:
            return {}
        moved = {}
        settings = settings_of(config, STATES)
        if settings is not None and settings.state_budget is None:
            moved[STATES] = with_settings(config, state_budget=0)
        # clipping by norm would also keep gradients on the host
        if self._releases and not self._planner.trainer.get("gradient_clip_val"):
            moved[WEIGHTS] = replace(config, techniques=(*config.techniques, technique_for(WEIGHTS)))
        return moved

    def _traces(self, configs: Mapping[str, Configuration]) -> dict[str, Trace]:
        """Return the trace of each preset that the module can be trained with."""
        if self._scaled is not None:
            return self._scaled.at(configs, self._size)

        def traced(config: Configuration) -> Trace | None:
            try:
                config.check()
                return self._trace(config)
            except Exception:  # of a technique that refuses the module, or can't be combined with the base
                return None

        traces = run_in_forks(*(partial(traced, config) for config in configs.values()))
        return {name: trace for name, trace in zip(configs, traces, strict=True) if trace is not None}

    def _costs(self, config: Configuration, trace: Trace) -> tuple[int, float]:
        return self._planner.costs(self._arranged(config), trace)

    def _table(self, trace: Trace) -> BlockTable:
        return block_table(trace, self._planner.device, self._parts)

    def _arranged(self, config: Configuration) -> Arrangement:
        arranged = arrange(config, self._planner.trainer)
        return replace(arranged, accumulation=arranged.accumulation * self._parts)

    # --- presets ---

    def _configured(self, choice: Choice) -> Configuration:
        """Return the base with a choice's modes and budgets."""
        by_mode = {mode: [name for name, one in choice.modes.items() if one == mode] for mode in MODES}
        by_mode = {mode: names for mode, names in by_mode.items() if names}
        config = self.base if by_mode.keys() <= {KEEP} else with_modes(self.base, by_mode)
        if size := choice.away.get(STATES, 0) + choice.away.get(FIRST, 0):
            config = with_settings(config, state_budget=max(0, self._resident["optimizer_states"] - size))
        if size := choice.away.get(WEIGHTS, 0):
            left = None if size >= ALL * self._slabs else max(0, self._resident["weights"] - size)
            added = technique_for(WEIGHTS, weight_budget=left)
            config = replace(config, techniques=(*config.techniques, added))
        config.check()
        return config

    # --- traces ---

    def _trace(self, config: Configuration) -> Trace:
        """Return the marked trace of a preset."""
        return self._planner.captured(self._arranged(config), self._size)
