"""The solved plan: a preset whose blocks each keep, recompute or move what is fastest within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from lightning_solo.cards.blocks import HOST_INPUT, KEEP, KEEP_PRODUCTS, MODES, OFFLOAD, RECOMPUTE
from lightning_solo.cards.card import resources
from lightning_solo.cards.catalogue import catalogue
from lightning_solo.cards.configuration import Chosen, Configuration
from lightning_solo.errors import BudgetError, PlanError, SoloError
from lightning_solo.planner.bases import SOLVED, Bases
from lightning_solo.planner.block_tables import block_table, problem_of
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.device import CPU
from lightning_solo.planner.fake_modules import empty_parameters
from lightning_solo.planner.forks import run_in_forks
from lightning_solo.planner.plan import TIGHT, Plan, with_host_memory
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.solver import (
    BACKWARD,
    DOWN,
    FORWARD,
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

ROUNDS = 3  # in which the traced plan's difference from the tables corrects the budget
ALL = 0.99  # of the bytes of slabs, which are padded: from here on no block's weights stay on the device
STATES, WEIGHTS = "state_budget", "weight_budget"
FIRST = "first states"  # those of weights before the first block, whose copies end backward: no operator hides them
PASSES = {
    STATES: {(BACKWARD, UP): 1, (BACKWARD, DOWN): 1},
    WEIGHTS: {(FORWARD, UP): 1, (BACKWARD, UP): 1, (BACKWARD, DOWN): 1},
}
"""Part that may be on the host -> number of times that each of its bytes passes the bus in a phase, per direction."""


def solved(planner: Planner, bases: Bases, plans: Mapping[str, Plan]) -> Plan:
    """Return the fastest plan of a few bases with solved modes of blocks; if none fits, the one that lacks least.

    Args:
        planner: of the module.
        bases: presets to which modes may be added.
        plans: those of the bases, by name.

    Raises:
        PlanError: nothing can be solved: a base fits as it is, or no block can have a mode.
    """
    candidates = {name: plans[name] for name in bases.bases if name in plans}
    results: list[Plan] = []
    reasons: list[str] = []
    for name in _promising(candidates):
        if _judged(candidates[name], bases).verdict == "fits":
            reasons.append(f"{name} fits as it is")
            continue
        try:
            results.append(_Solver(planner, bases, bases.bases[name]).plan())
        except SoloError as error:
            reasons.append(f"{name}: {error}")
    if not results:
        raise PlanError("; ".join(reasons) or "no preset leaves the choice for the blocks open")
    return min(results, key=lambda plan: (not plan.fits, plan.missing_bytes, plan.seconds_per_example))


def _promising(plans: Mapping[str, Plan]) -> list[str]:
    """Return the fastest of the presets, and the one that needs least memory."""
    if not plans:
        return []
    fastest = min(plans, key=lambda name: plans[name].seconds_per_example)
    smallest = min(plans, key=lambda name: plans[name].needed_bytes)
    return list(dict.fromkeys((fastest, smallest)))


def _judged(plan: Plan, bases: Bases) -> Plan:
    return plan if bases.host_memory is None else with_host_memory(plan, bases.host_memory)


class _Solver:
    """Solves the modes of blocks for one base."""

    def __init__(self, planner: Planner, bases: Bases, base: Configuration) -> None:
        self._planner, self._bases, self._base = planner, bases, base
        self._without_launches = 1.0
        self._resident: Mapping[str, int] = {}  # bytes of each category, if all of them are on the device
        self._slabs = 0  # bytes of the host that the weights of all blocks take
        self._cuda = planner.device.name != CPU
        share = 1.0 if bases.accept_tight else 1 / (1 + TIGHT)
        self._budget = int(planner.budget * share)
        # on a CPU the device's bytes are the host's, and moving them would gain nothing
        self._host = int(bases.host_memory * share) if self._cuda and bases.host_memory is not None else None

    def plan(self) -> Plan:
        """Return the plan of the best choice, traced as a whole; its differences from the tables correct them."""
        problem = self._problem()
        tried: dict[str, tuple[tuple[bool, float], Configuration]] = {}
        host = problem.host
        for _ in range(ROUNDS):
            try:
                choice = solve(problem)
            except BudgetError:
                if tried:
                    break
                choice = closest(problem)
            config = self._configured(choice)
            if repr(config) in tried:
                break
            trace = self._trace(config)
            needed, seconds = self._costs(config, trace)
            lacking = max(0, needed - self._budget) + max(0, trace.host_bytes - (host or trace.host_bytes))
            tried[repr(config)] = (lacking > 0, lacking or seconds), config
            problem = corrected(problem, choice, self._without_launches * seconds)
            problem = replace(
                problem,
                budget=self._budget - (needed - choice.peak),
                host=None if host is None else host - max(0, trace.host_bytes - choice.host),
            )
        _, config = min(tried.values(), key=lambda each: each[0])
        plan = _judged(self._planner.plan(SOLVED, config), self._bases)
        return replace(plan, configuration=fields_of(config))

    # --- tables ---

    def _problem(self) -> Problem:
        """Return the tables of all modes, from a trace for each."""
        kept, device = self._trace(self._base), self._planner.device
        names = list(dict.fromkeys(mark.block for mark in kept.marks))
        modes = (KEEP_PRODUCTS, RECOMPUTE, *((HOST_INPUT, OFFLOAD) if self._cuda else ()))
        configs = {mode: with_modes(self._base, {mode: names}) for mode in modes}
        configs |= self._moved(configs[RECOMPUTE])
        traces = self._traces(configs)
        tables, costs = {KEEP: block_table(kept, device)}, {KEEP: self._costs(self._base, kept)}
        for mode in traces.keys() & set(modes):
            table = block_table(traces[mode], device)
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
            self._slabs = size if part == WEIGHTS else self._slabs
            gone = tables[RECOMPUTE].base - block_table(traces[part], device).base
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
        freed = (resources(chosen.card.frees, chosen.settings) for chosen in self._base.techniques)
        return any("gradients" in each for each in freed)

    def _moved(self, config: Configuration) -> dict[str, Configuration]:
        """Return the presets with all optimizer states, or all blocks' weights, on the host, where that is possible."""
        if not self._cuda:
            return {}
        moved = {}
        settings = _settings(config, STATES)
        if settings is not None and settings.state_budget is None:
            moved[STATES] = with_settings(config, state_budget=0)
        # clipping by norm would also keep gradients on the host
        if self._releases and not self._planner.trainer.get("gradient_clip_val"):
            moved[WEIGHTS] = replace(config, techniques=(*config.techniques, _chosen(WEIGHTS)))
        return moved

    def _traces(self, configs: Mapping[str, Configuration]) -> dict[str, Trace]:
        """Return the trace of each preset that the module can be trained with."""

        def traced(config: Configuration) -> Trace | None:
            try:
                config.check()
                return self._trace(config)
            except Exception:  # of a technique that refuses the module, or can't be combined with the base
                return None

        traces = run_in_forks(*(partial(traced, config) for config in configs.values()))
        return {name: trace for name, trace in zip(configs, traces, strict=True) if trace is not None}

    def _costs(self, config: Configuration, trace: Trace) -> tuple[int, float]:
        return self._planner.costs(arrange(config, self._planner.trainer), trace)

    # --- presets ---

    def _configured(self, choice: Choice) -> Configuration:
        """Return the base with a choice's modes and budgets."""
        by_mode = {mode: [name for name, one in choice.modes.items() if one == mode] for mode in MODES}
        by_mode = {mode: names for mode, names in by_mode.items() if names}
        config = self._base if by_mode.keys() <= {KEEP} else with_modes(self._base, by_mode)
        if size := choice.away.get(STATES, 0) + choice.away.get(FIRST, 0):
            config = with_settings(config, state_budget=max(0, self._resident["optimizer_states"] - size))
        if size := choice.away.get(WEIGHTS, 0):
            left = None if size >= ALL * self._slabs else max(0, self._resident["weights"] - size)
            added = _chosen(WEIGHTS, weight_budget=left)
            config = replace(config, techniques=(*config.techniques, added))
        config.check()
        return config

    # --- traces ---

    def _trace(self, config: Configuration) -> Trace:
        """Return the marked trace of a preset."""
        arranged = arrange(config, self._planner.trainer)
        return self._planner.captured(arranged)


def with_modes(base: Configuration, modes: Mapping[str, Sequence[str]]) -> Configuration:
    """Return a preset whose blocks have modes, and that moves tensors to the host if a mode does."""
    added = [_chosen("modes", modes={mode: list(names) for mode, names in modes.items()})]
    if modes.keys() & {HOST_INPUT, OFFLOAD}:
        added.append(_chosen("moving"))
    return replace(base, techniques=(*base.techniques, *added))


def with_settings(config: Configuration, **values: Any) -> Configuration:
    """Return a preset with other settings of the technique whose card says that the solver decides them."""
    techniques = tuple(
        replace(chosen, settings=replace(chosen.settings, **values)) if chosen.card.solved in values else chosen
        for chosen in config.techniques
    )
    return replace(config, techniques=techniques)


def _settings(config: Configuration, part: str) -> Any:
    return next((chosen.settings for chosen in config.techniques if chosen.card.solved == part), None)


def _chosen(part: str, **values: Any) -> Chosen:
    card = next(card for card in catalogue().cards.values() if card.solved == part)
    option = f"callback.{card.name}"
    return Chosen(card, card.settings.parse(values, option), option)
