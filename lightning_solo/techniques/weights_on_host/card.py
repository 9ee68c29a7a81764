"""The card of `weights_on_host`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.budget import budget_setting
from lightning_solo.cards.card import Card, resources
from lightning_solo.cards.configuration import Chosen, Configuration
from lightning_solo.cards.engines import alike
from lightning_solo.cards.footprint import Footprint, Request, without_gradients
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.released_gradients import scaled_gradients
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import ConflictError
from lightning_solo.units import parse_budget

OPTION = "callback.weights_on_host"
AUTO = "auto"


def _bytes(budget: Any) -> int | None:
    """Return the bytes of a budget; None for auto."""
    return None if budget == AUTO else parse_budget(budget, least=0)


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of WeightsOnHost."""

    blocks: str | Sequence[str] = blocks_setting()
    weight_budget: int | str | None = budget_setting(
        "bytes of weights that stay on the device, such as 8GiB: first those outside the blocks, then the last blocks';"
        " auto: as many as the first step leaves room for; null: no block's",
        _bytes,
    )
    window: int = setting(
        3,
        "buffers on the device, each as large as the largest block: one is used, one goes back, one comes",
        at_least=2,
    )
    clipping: str = setting(
        "auto",
        "by norm: deferred keeps gradients on the host, and updates blocks in the next forward; second_backward runs"
        " each batch twice, first to measure the norm, and keeps none. auto: deferred if the host has room",
        allowed=("auto", "deferred", "second_backward"),
    )
    kept_gradients: str = setting(
        "exact",
        "under deferred clipping, which keeps gradients on the host until the next forward: exact, as they come, or"
        " bf16, which halves the bytes of fp32 weights' gradients and rounds each number once; device: as they come,"
        " on the device, which spares the bus",
        allowed=("exact", "bf16", "device"),
    )

    def _check_together(self) -> None:
        if self.clipping == "second_backward" and self.kept_gradients != "exact":
            raise ConflictError(
                f"{OPTION}.kept_gradients={self.kept_gradients} and {OPTION}.clipping=second_backward, which keeps no"
                f" gradients; write {OPTION}.kept_gradients=exact, or {OPTION}.clipping=deferred"
            )

    @property
    def budget(self) -> int | None:
        """Bytes of weights that stay on the device. None stands for those outside the blocks, in the first step."""
        return None if self.weight_budget is None else _bytes(self.weight_budget)


def _why_not(chosen: Chosen) -> str | None:
    """Return why a technique can't run beside this one; None if it can."""
    owned = chosen.owned()
    if chosen.card.phase is Phase.COMPILE:
        return "compiles the blocks, which get their weights as they run"
    if chosen.card.group == "strategy":
        return "stores the weights in its own way"
    if owned & {"accumulation_factor", "micro_batches"}:
        return "makes a step of several micro-batches"
    if chosen.card.name == "frozen_streaming":
        return "streams frozen weights, which this does too"
    if "averaged_weights" in resources(chosen.card.owns, chosen.settings) or chosen.card.name == "pruning":
        return "reads and changes weights outside their blocks"
    return None


def _rivals(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        if why := _why_not(chosen):
            return (
                f"{OPTION} updates each block's weights in its backward and keeps them on the host, and"
                f" {chosen.choice} {why}; write {chosen.removal}, or ~{OPTION}"
            )
    return None


def _accumulates(settings: Settings, configuration: Configuration) -> str | None:
    factor = configuration.accumulate_grad_batches
    if factor in (None, 1):
        return None
    return (
        f"{OPTION} updates each block in the backward of one micro-batch, and accumulate_grad_batches={factor}; write"
        f" accumulate_grad_batches=1 and a batch {factor} times as large, or ~{OPTION}"
    )


def _scaled_gradients(settings: Settings, configuration: Configuration) -> str | None:
    return scaled_gradients(OPTION, configuration.precision)


def footprint(settings: Settings, request: Request, before: Footprint) -> Footprint:
    """Return the bytes without gradients; how many weights leave depends on the blocks, which aren't known here."""
    return without_gradients(before, request, "device")


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan all blocks' weights on the host."""
    tracing = replace(tracing, ring=settings.window)
    if settings.weight_budget != AUTO:
        return tracing
    assumption = "all blocks' weights are planned on the host: in a run, what fits stays on the device"
    return replace(tracing, assumptions=(*tracing.assumptions, assumption))


CARD = Card(
    name="weights_on_host",
    target="lightning_solo.techniques.weights_on_host.technique:WeightsOnHost",
    phase=Phase.STEP,
    settings=Settings,
    saves="the device memory of the blocks' weights, except for ``window`` blocks, and of all gradients, but for those"
    " of the layer that backward is at",
    costs="page-locked host memory for these weights. Each block's pass the bus twice to the device and, as far as they"
    " are trained, once back, in every step, while other blocks are computed. Under clipping by norm the gradients pass"
    " it once each way, and take as much host memory as the weights that are trained; or each batch runs twice",
    numerics="bit-exact: the same numbers, at other places",
    conflicts="accumulation, manual optimization, 16-mixed, compiled blocks, averages of the weights,"
    " pruning, strategies that store the weights in their own way (all refused)",
    reference="Pudipeddi et al. 2020, layer-to-layer execution, https://arxiv.org/abs/2002.05645; Ren et al. 2021,"
    " ZeRO-Offload, https://arxiv.org/abs/2101.06840",
    exact=True,
    solved="weight_budget",
    frees=frozenset({"gradients"}),
    rules=(_rivals, _accumulates, _scaled_gradients),
    planned="lightning_solo.techniques.weights_on_host.card:planned",
    footprint="lightning_solo.techniques.weights_on_host.card:footprint",
    engines=alike("it stores weights in its own way on one device"),
)
