"""The preset `auto`: among the fastest presets whose plans fit, it takes the one that changes least."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from lightning_solo.cards.configuration import AutoSettings, Configuration
from lightning_solo.errors import BudgetError, PresetError, SoloError
from lightning_solo.machine import host_memory
from lightning_solo.planner import preset_plans
from lightning_solo.planner.bases import (
    BLOCK_MICRO_BATCHES,
    MICRO_BATCH,
    SOLVED,
    Bases,
    configuration_of,
    file_of,
    is_base,
    save,
    settings_of,
    solved_lines,
)
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.device import this_device
from lightning_solo.planner.plan import EQUAL, TIGHT, Plan, as_fast
from lightning_solo.planner.table import table
from lightning_solo.planner.worker import WORKER
from lightning_solo.presets.compose import compose, compose_all
from lightning_solo.presets.devices import budget_bytes, budget_on
from lightning_solo.tables import table_console
from lightning_solo.units import MiB, format_bytes


def choose(
    config: Configuration,
    module: Any,
    batch: Any,
    *,
    check: Callable[[Configuration], None],
    trainer: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    console: Console | None = None,
) -> tuple[str, Configuration, Plan]:
    """Return the name, the configuration and the plan of the first preset that fits, in the order of `ranked`.

    Args:
        config: of the preset `auto`: its precision and accumulation are those of every candidate.
        module: a LightningModule, or a function that returns one.
        batch: one micro-batch, a function that returns one, or None for the module's own loader.
        check: raises a SoloError for a preset that this machine can't run.
        trainer: the user's own arguments of the Trainer.
        allow: prefixes of ``_target_`` that the user trusts.
        console: for the table.

    Raises:
        BudgetError: none fits; names the nearest, and the missing memory.
        PlanError: the module can't be planned.
    """
    settings = config.auto or AutoSettings()
    path = None if settings.save_preset is None else file_of(settings.save_preset, "auto.save_preset=")
    named = None if settings.presets is None else [name for name in settings.presets if name != SOLVED] or None
    configs = candidates(config, check, named, allow)
    host = host_memory()[1]  # of this machine, which runs the training
    bases = None
    if settings.presets is None or SOLVED in settings.presets:
        open_ones = {name: each for name, each in configs.items() if is_base(each)}
        bases = Bases(open_ones, settings.whole_batch)
    try:
        plans: Any = preset_plans.plan(
            module,
            batch,
            presets=configs,
            device=settings.device,
            budget=settings.budget,
            host_memory=host,
            trainer=trainer,
            allow=allow,
            bases=bases,
        )
    finally:
        WORKER.close()  # or it keeps its memory during training
    accepted = ("fits", "tight") if settings.accept_tight else ("fits",)
    chosen = next((plan for plan in plans if plan.verdict in accepted), None)
    console = console or table_console()
    console.print(table(plans, chosen, console.width))
    if chosen is None:
        target = this_device() if settings.device is None else device_of(settings.device)
        raise none_fits(plans, target.memory_bytes)
    lines = [why(chosen, plans)]
    if chosen.configuration is not None:
        configs[chosen.preset] = configuration_of(chosen, allow)
        if path is not None:
            lines.append(
                f"auto: {chosen.preset} is written to {path}{save(chosen, path)}; solo={settings.save_preset} trains"
                " with it again"
            )
        lines += [f"auto: {chosen.preset}: {line}" for line in solved_lines(configs[chosen.preset])]
        if settings_of(configs[chosen.preset], MICRO_BATCH) is not None:
            lines.append(
                f"auto: {chosen.preset}: its micro-batches need a loss that is the mean over examples, which the first"
                " batch checks; auto.whole_batch=true plans without them"
            )
        if settings_of(configs[chosen.preset], BLOCK_MICRO_BATCHES) is not None:
            lines.append(
                f"auto: {chosen.preset}: its blocks run in micro-batches, since no other solved plan fits; the first"
                " batch checks that a block's examples are independent; auto.whole_batch=true plans without them"
            )
    elif path is not None:
        lines.append(f"auto: {path} isn't written: {chosen.preset} is a preset already")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return chosen.preset, configs[chosen.preset], chosen


def check_room(plan: Plan, settings: AutoSettings) -> None:
    """Check that this machine has the memory that the plan of a resumed run needs.

    Raises:
        BudgetError: it hasn't; names both figures and the remedy.
    """
    target = this_device() if settings.device is None else device_of(settings.device)
    budget = budget_on(target, budget_bytes(settings.budget), f"auto.budget={settings.budget}")
    here = replace(plan, budget_bytes=budget, host_memory_bytes=host_memory()[0] if plan.host_bytes else None)
    if here.missing_bytes:
        raise BudgetError(
            f"auto: this run trains with {plan.preset}, which needs {here.needs}; {target.label} has"
            f" {format_bytes(budget)} here; write resume=override to plan the rest of the run anew",
            plan.needed_bytes,
            budget,
        )


def none_fits(plans: Sequence[Plan], memory: int = 0) -> BudgetError:
    """Return the error to raise if no plan is accepted; it names the nearest plan and a remedy.

    Args:
        plans: best first.
        memory: bytes of the device, up to which a larger budget is named.
    """
    nearest = min(plans, key=lambda plan: (plan.missing_bytes, plan.needed_bytes))
    most = max(plan.largest_micro_batch or 0 for plan in plans)
    tight = next((plan for plan in plans if plan.verdict == "tight"), None)
    on_host = nearest.margin_bytes >= 0 and nearest.host_shortage != ""
    larger = int(nearest.needed_bytes * (1 + TIGHT)) // MiB + 1
    advice = "take a smaller model" + (f", or batches of {most}" if most else "")
    if not on_host and larger * MiB <= memory:
        advice = f"write auto.budget={larger}MiB, or {advice}"
    if tight is not None:
        takes = f", and takes {tight.host_shortage}" if tight.host_shortage else ""
        advice = (
            f"auto.accept_tight=true would take {tight.preset}, which leaves {format_bytes(tight.margin_bytes)}{takes}"
        )
    return BudgetError(
        f"auto: no preset fits in {format_bytes(nearest.budget_bytes)}; the nearest, {nearest.preset}, needs"
        f" {nearest.shortage}; {advice}",
        nearest.host_needed_bytes if on_host else nearest.needed_bytes,
        nearest.host_memory_bytes or 0 if on_host else nearest.budget_bytes,
    )


def candidates(
    config: Configuration, check: Callable[[Configuration], None], presets: Sequence[str] | None, allow: Sequence[str]
) -> dict[str, Configuration]:
    """Return the presets to compare, with the precision and accumulation of ``config``, without duplicates.

    Raises:
        PresetError: there is nothing to compare.
    """
    configs: dict[str, Configuration] = {}
    refused: dict[str, str] = {}
    known = compose_all(allow=allow) if presets is None else {name: compose(name, allow=allow) for name in presets}
    for name, preset in known.items():
        if preset.auto is not None:
            raise PresetError(f"auto.presets={[*known]}: auto chooses among other presets; drop {name}")
        if preset.accumulates:
            refused[name] = "its optimizer step takes several micro-batches, which is another global batch"
            continue
        if preset.makes_batches:
            refused[name] = "it makes other batches than the loader's, and plans are for the loader's"
            continue
        if presets is None and (caveats := preset.caveats):
            refused[name] = f"{'; '.join(caveats)}; auto.presets=[..., {name}] would consider it"
            continue
        candidate = replace(
            preset.with_techniques_of(config),
            precision=config.precision,
            accumulate_grad_batches=config.accumulate_grad_batches,
        )
        same = next((other for other, seen in configs.items() if seen == candidate), None)
        try:
            candidate.check()
            check(candidate)
        except SoloError as error:
            refused[name] = str(error)
            continue
        if same is None:
            configs[name] = candidate
        elif preset.precision == config.precision:  # of two equal presets, take the one that needs no override
            del configs[same]
            configs[name] = candidate
    if not configs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise PresetError(f"auto: none of {', '.join(known)} can be chosen: {reasons}")
    return configs


def why(chosen: Plan, plans: Sequence[Plan]) -> str:
    """Return the reason for the choice, in a sentence; ``plans`` are in the order in which to try them."""
    others = [plan for plan in plans if plan is not chosen and plan.verdict == chosen.verdict]
    leaves = f"it needs {format_bytes(chosen.needed_bytes)} of {format_bytes(chosen.budget_bytes)}"
    if chosen.host_shortage:
        leaves += f", and {chosen.host_shortage}"
    if not others:
        only = ("the only one that fits" if plans[1:] else "which fits; no other was planned") + (
            ", if only just" if chosen.verdict == "tight" else ""
        )
        return f"auto: {chosen.preset}, {only}; {leaves}"
    if as_fast(others[0], chosen):
        return f"auto: {chosen.preset}, which changes least among the fastest that fit ({EQUAL}); {leaves}"
    less = 1 - chosen.seconds_per_example / others[0].seconds_per_example
    before = f"in an estimated {less:.0%} less time than {others[0].preset}"
    return f"auto: {chosen.preset}, the fastest that fits, {before}; {leaves}"
