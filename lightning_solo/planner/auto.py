"""The preset `auto`: the fastest preset that fits, by its plan; with the table of what was considered, and why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table

from lightning_solo.errors import BudgetError, PresetError, SoloError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.memory.reading import read
from lightning_solo.planner.ask import plan_configs
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.worker import WORKER
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.schema import SoloConfig
from lightning_solo.units import format_bytes

DIFFERENCE = 0.10  # between plan and reading, from which on it is said


def choose(
    config: SoloConfig,
    module: Any,
    batch: Any,
    *,
    check: Callable[[SoloConfig], None],
    trainer: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    console: Console | None = None,
) -> tuple[str, SoloConfig, Plan]:
    """Return the name, the configuration and the plan of the fastest preset that fits.

    Args:
        config: of the preset `auto`: its precision and accumulation are those of every candidate.
        module: a LightningModule, or a function that returns one.
        batch: one micro-batch, a function that returns one, or None for the module's own loader.
        check: raises a SoloError for a preset that this machine can't run.
        trainer: the user's own arguments of the Trainer.
        allow: prefixes of ``_target_`` that the user trusts.
        console: where the table goes.

    Raises:
        BudgetError: none fits; names the nearest, and what is missing.
        PlanError: the module can't be planned.
    """
    asked = config.auto or {}
    configs = candidates(config, check, asked.get("presets"), allow)
    try:
        plans = plan_configs(
            module, batch, configs, device=asked.get("device"), budget=asked.get("budget"), trainer=trainer, allow=allow
        )
    finally:
        WORKER.close()  # it would keep its memory while training runs
    accepted = ("fits", "tight") if asked.get("accept_tight") else ("fits",)
    chosen = next((plan for plan in plans if plan.verdict in accepted), None)
    console = console or Console()
    console.print(table(plans, chosen))
    if chosen is None:
        nearest = min(plans, key=lambda plan: plan.needed_bytes)
        most = max(plan.largest_micro_batch or 0 for plan in plans)
        tight = next((plan for plan in plans if plan.verdict == "tight"), None)
        advice = (
            f"auto.accept_tight=true would take {tight.preset}, which leaves {format_bytes(tight.margin_bytes)}"
            if tight
            else "take a smaller model" + (f", or batches of {most}" if most else "")
        )
        raise BudgetError(
            f"auto: no preset fits in {format_bytes(nearest.budget_bytes)}; the nearest, {nearest.preset}, needs"
            f" {format_bytes(nearest.needed_bytes)}; {advice}",
            nearest.needed_bytes,
            nearest.budget_bytes,
        )
    console.print(why(chosen, plans), soft_wrap=True, highlight=False)
    return chosen.preset, configs[chosen.preset], chosen


def candidates(
    config: SoloConfig, check: Callable[[SoloConfig], None], presets: Sequence[str] | None, allow: Sequence[str]
) -> dict[str, SoloConfig]:
    """Return the presets that are compared: with this precision, this accumulation, on this machine, each once.

    Raises:
        PresetError: none is left.
    """
    found: dict[str, SoloConfig] = {}
    refused: dict[str, str] = {}
    names = [name for name in preset_files() if name != "auto"] if presets is None else list(presets)
    for name in names:
        own = compose(name, allow=allow)
        if own.auto is not None:
            raise PresetError(f"auto.presets={names}: auto chooses among other presets; drop {name}")
        if own.callback.get("accumulation_schedule") or own.accumulate_grad_batches not in (None, 1):
            refused[name] = "its optimizer step is of several micro-batches: another global batch, another training"
            continue
        made = replace(
            own,
            precision=config.precision,
            accumulate_grad_batches=config.accumulate_grad_batches,
            callback={**own.callback, **config.callback},
        )
        same = next((other for other, there in found.items() if there == made), None)
        try:
            check(made)
        except SoloError as error:
            refused[name] = str(error)
            continue
        if same is None:
            found[name] = made
        elif own.precision == config.precision:  # of two that are the same now, the one that is so by itself
            found[name] = found.pop(same)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise PresetError(f"auto: none of {', '.join(names)} can be chosen: {reasons}")
    return found


def table(plans: Sequence[Plan], chosen: Plan | None = None) -> Table:
    """Return what was considered, the one to try first in front."""
    fastest = min((plan.seconds_per_example for plan in plans if plan.fits), default=None)
    made = Table(box=None, pad_edge=False, title_justify="left", title_style="")
    for name in ("preset", "verdict", "peak", "needs", "of", "host", "step", "largest batch"):
        words = name in ("preset", "verdict")
        made.add_column(name, justify="left" if words else "right", no_wrap=words)
    for plan in plans:
        step = "" if not fastest else f"{plan.seconds_per_example / fastest:.2f} x"
        made.add_row(
            f"{plan.preset} *" if plan is chosen else plan.preset,
            plan.verdict,
            format_bytes(plan.peak_bytes),
            format_bytes(plan.needed_bytes),
            format_bytes(plan.budget_bytes),
            format_bytes(plan.host_bytes) if plan.host_bytes else "",
            step,
            "" if plan.largest_micro_batch is None else str(plan.largest_micro_batch),
        )
    return made


def why(chosen: Plan, plans: Sequence[Plan]) -> str:
    """Return why this one was chosen, in a sentence.

    A plan's order is by time among those that fit; the next one is the alternative.
    """
    others = [plan for plan in plans if plan is not chosen and plan.verdict == chosen.verdict]
    leaves = f"it needs {format_bytes(chosen.needed_bytes)} of {format_bytes(chosen.budget_bytes)}"
    if not others:
        only = "the only one that fits" + (", if only just" if chosen.verdict == "tight" else "")
        return f"auto: {chosen.preset}, {only}; {leaves}"
    slower = others[0].seconds_per_example / (chosen.seconds_per_example or 1.0) - 1
    before = f"by an estimated {slower:.0%} before {others[0].preset}"
    return f"auto: {chosen.preset}, the fastest that fits, {before}; {leaves}"


class PlanCheck(Callback):
    """Compares the plan with what the first two optimizer steps took on the GPU; resets its peak counter before them.

    Args:
        plan: of the preset that runs.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._done = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the peak from here."""
        self._done = trainer.strategy.root_device.type != "cuda"
        if not self._done:
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare, once."""
        if self._done or trainer.global_step < 2:
            return
        self._done = True
        peak = read(trainer.strategy.root_device).peak_allocated or 0
        states = Ledger(pl_module, trainer.optimizers).live()
        if message := difference(self.plan, peak, states):
            warnings.warn(message, stacklevel=2)


def difference(plan: Plan, peak: int, states: Mapping[str, int]) -> str | None:
    """Return what to say about a peak that is more than 10 % off the plan, with both breakdowns; else None."""
    if abs(peak - plan.peak_bytes) <= DIFFERENCE * plan.peak_bytes:
        return None
    held = {name: states[name] for name in ("weights", "gradients", "optimizer_states")}
    read_ = {**held, "activations and temporaries": peak - sum(held.values())}
    return (
        f"auto planned a peak of {format_bytes(plan.peak_bytes)} for {plan.preset}, the first steps took"
        f" {format_bytes(peak)}; planned: {_words(plan.breakdown)}; read: {_words(read_)}"
    )


def _words(breakdown: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in breakdown.items() if size)
