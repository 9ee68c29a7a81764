"""The card of `gradient_release`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import EXACT, answers
from lightning_solo.cards.footprint import Footprint, Request, without_gradients
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.released_gradients import scaled_gradients
from lightning_solo.cards.settings import TechniqueSettings, setting

OPTION = "callback.gradient_release"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of GradientRelease."""

    buffer: str = setting(
        "device",
        "where gradients are kept for accumulation or clipping by norm",
        allowed=("device", "host"),
    )


def _scaled_gradients(settings: Settings, configuration: Configuration) -> str | None:
    return scaled_gradients(OPTION, configuration.precision)


def _under_fsdp(settings: Settings, configuration: Configuration) -> str:
    """Return why gradients can't be kept until the end of a window; without one they are released."""
    owned = {"accumulation_factor", "micro_batches"}
    keepers = [(each.choice, each.removal) for each in configuration.techniques if each.owned() & owned]
    if (batches := configuration.accumulate_grad_batches or 1) > 1:
        keepers.append((f"accumulate_grad_batches={batches}", "accumulate_grad_batches=1"))
    if not keepers:
        return EXACT
    what, remedy = keepers[0]
    return f"{what} would keep a process's shards of gradients until the step; write {remedy}"


def footprint(settings: Settings, request: Request, before: Footprint) -> Footprint:
    """Return the bytes without gradients, or with their sum."""
    return without_gradients(before, request, settings.buffer)


CARD = Card(
    name="gradient_release",
    target="lightning_solo.techniques.gradient_release.technique:GradientRelease",
    phase=Phase.STEP,
    settings=Settings,
    saves="gradients, 4 bytes per parameter in fp32, 2 in bf16, but for those of the layer that backward is at",
    costs="a launch per large parameter instead of one for many. Accumulation keeps the sum of the gradients, 4 bytes"
    " per parameter. Clipping by norm without accumulation keeps the gradients in the type of the weights. With"
    " ``buffer=host`` either is on the host",
    numerics="exact: with accumulation and clipping by norm or value the bits of a plain run in fp32. Under an"
    " accumulation schedule the losses of a short window are weighted, not its gradients: equal within rounding",
    conflicts="16-mixed, optimizers whose step needs all gradients at once (LBFGS, SparseAdam, Muon), hooks that read"
    " ``.grad`` after backward, strategies with an engine of their own. Under manual optimization gradients are kept",
    reference="Lv et al. 2023, LOMO, arXiv 2306.09782; torch's tutorial on optimizer steps in backward",
    exact=True,
    owns=frozenset({"gradients"}),
    frees=frozenset({"gradients"}),
    rules=(_scaled_gradients,),
    footprint="lightning_solo.techniques.gradient_release.card:footprint",
    engines=answers(
        ddp="it steps before gradients are averaged over processes, which then have different weights",
        fsdp=_under_fsdp,
        zero3="the engine keeps the gradients",
    ),
)
