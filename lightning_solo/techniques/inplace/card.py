"""The card of `inplace`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import EXACT, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of InPlace."""

    dropouts: bool = setting(True, "also run dropouts in place, not activations alone")


def _compiled(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.has("regional_compilation"):
        return (
            "callback.inplace and callback.regional_compilation, which itself decides what is overwritten; write"
            " ~callback.inplace"
        )
    return None


def _recorded(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.has("distillation"):
        return (
            "callback.inplace and callback.distillation, which records the forwards of a step, and would take the"
            " check's for them; write ~callback.inplace"
        )
    return None


def _unfrozen(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        if chosen.card.name == "layer_freezing" and chosen.settings.milestones:
            return (
                "callback.inplace and callback.layer_freezing.milestones, after which backward needs tensors that it"
                " doesn't need in the first batch; write callback.layer_freezing.milestones=[] and"
                " callback.layer_freezing.trained_blocks=1, or ~callback.inplace"
            )
    return None


def _engine(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.has("zero_offload"):
        return (
            "callback.inplace and strategy=zero_offload, whose engine takes the gradients that are compared; write"
            " ~callback.inplace, or ~strategy"
        )
    return None


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan what the inputs' readers allow; fake tensors have no gradients to compare."""
    assumption = "inplace is planned without its comparison of gradients"
    return tracing.assuming(assumption, attached=settings)


CARD = Card(
    name="inplace",
    target="lightning_solo.techniques.inplace.technique:InPlace",
    phase=Phase.SAVED_TENSORS,
    settings=Settings,
    saves="of LeakyReLU the input that is saved for backward; of ReLU and dropout one tensor while they run. The bytes"
    " of the first batch are logged",
    costs="three passes over the first batch instead of one; a second forward in batches 2, 10, 100, 1,000 and 10,000",
    numerics="bit-exact: loss and gradients of the first batch are compared to the bit",
    conflicts="compiled blocks, `distillation`, milestones of `layer_freezing`, `zero_offload`, manual optimization",
    reference="Rota Bulo et al. 2018, In-Place Activated BatchNorm, https://arxiv.org/abs/1712.02616",
    exact=True,
    rules=(_compiled, _recorded, _unfrozen, _engine),
    planned="lightning_solo.techniques.inplace.card:planned",
    engines=answers(
        ddp=EXACT,
        fsdp="it compares gradients that it asks autograd for, which reach the gathered weights and not their shards",
        zero3="the engine takes the gradients that are compared",
    ),
)
