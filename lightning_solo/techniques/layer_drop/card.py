"""The card of `layer_drop`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing

GRADIENTS_OF_ZERO = "DeepSpeed gives skipped blocks gradients of zero, with which AdamW still changes their weights"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of LayerDrop."""

    count: int = setting(1, "blocks that are skipped in each micro-batch", at_least=1)
    blocks: str | Sequence[str] = blocks_setting()


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan a run without skipped blocks: all blocks must have run before all optimizer states exist."""
    assumption = (
        f"layer_drop isn't planned: a run keeps the activations of {settings.count} blocks less, and takes less time by"
        " theirs"
    )
    return tracing.assuming(assumption, attached=None)


def _finds_unused(configuration: Configuration, engine: str) -> bool:
    chosen = next((each for each in configuration.techniques if each.card.engine == engine), None)
    return chosen is not None and bool(chosen.settings.find_unused_parameters)


def _under_ddp(settings: Settings, configuration: Configuration) -> str:
    if _finds_unused(configuration, "ddp"):
        return ROUNDING
    return (
        "skipped blocks have no gradient, for which DistributedDataParallel waits; write"
        " strategy.find_unused_parameters=true"
    )


def _under_fsdp(settings: Settings, configuration: Configuration) -> str:
    if not _finds_unused(configuration, "fsdp"):
        return ROUNDING
    return (
        "skipped blocks would have gradients of zero, with which AdamW still changes their weights; write"
        " strategy.find_unused_parameters=false"
    )


def _engine(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.has("zero_offload"):
        return (
            f"callback.layer_drop and strategy=zero_offload: {GRADIENTS_OF_ZERO}; write ~callback.layer_drop, or"
            " ~strategy"
        )
    return None


CARD = Card(
    name="layer_drop",
    target="lightning_solo.techniques.layer_drop.technique:LayerDrop",
    phase=Phase.STATES,  # after COMPILE: what is compiled is called or not, and never depends on the draw
    settings=Settings,
    saves="activations, computation and gradients of ``count`` blocks in each micro-batch",
    costs="regularisation that a short run may not need; in the first micro-batch a skipped block may run once, without"
    " gradients, to record the form of its output",
    numerics="differs from a plain run in training; validation runs all blocks. A skipped block has no gradient: the"
    " optimizer leaves its weights unchanged, without weight decay. Nothing is scaled",
    conflicts="`zero_offload`; a module that is compiled as a whole, which each draw would compile again",
    reference="Fan et al. 2019, LayerDrop, https://arxiv.org/abs/1909.11556; Huang et al. 2016, stochastic depth,"
    " https://arxiv.org/abs/1603.09382",
    caveat=lambda settings: "trains without some of the blocks at a time",
    rules=(_engine,),
    planned="lightning_solo.techniques.layer_drop.card:planned",
    engines=answers(
        ddp=_under_ddp,
        fsdp=_under_fsdp,
        zero3=GRADIENTS_OF_ZERO,
    ),
)
