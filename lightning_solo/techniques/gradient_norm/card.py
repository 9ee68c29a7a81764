"""The card of `gradient_norm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.card import Card, resources
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import EXACT, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


def _not_a_range(values: Sequence[float]) -> str | None:
    if len(values) == 2 and 0 <= values[0] < values[1]:
        return None
    return "write the least and the largest rms, such as [1e-3, 1e3]"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of GradientNorm."""

    every_n_steps: int = setting(50, "optimizer steps between two logged values", at_least=1)
    activation_range: Sequence[float] = setting(
        (1e-3, 1e3), "least and largest rms of a block's output in the first step; others are named", check=_not_a_range
    )
    gradient_range: Sequence[float] = setting(
        (1e-8, 1e2),
        "least and largest rms of a block's gradients in the first step; others are named. AdamW hardly moves a weight"
        " whose gradient is far below its eps, 1e-8",
        check=_not_a_range,
    )


def _engine(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        if chosen.card.group == "strategy" and "gradients" in resources(chosen.card.frees, chosen.settings):
            return (
                f"callback.gradient_norm and strategy={chosen.card.name}, whose engine keeps gradients in its own"
                f" buffers; write ~callback.gradient_norm"
            )
    return None


CARD = Card(
    name="gradient_norm",
    target="lightning_solo.techniques.gradient_norm.technique:GradientNorm",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it observes",
    costs="every ``every_n_steps`` optimizer steps a norm of each gradient, before and after clipping, and a wait for"
    " the device; in the first step a norm for each block's output",
    numerics="bit-exact; norms are computed in fp32, also those of 16-bit gradients",
    conflicts="a strategy whose engine keeps gradients to itself",
    reference="Pascanu et al. 2013, https://arxiv.org/abs/1211.5063 (clipping by the global norm)",
    exact=True,
    rules=(_engine,),
    planned="left out",
    engines=answers(ddp=EXACT, fsdp=EXACT, zero3="the engine keeps the gradients"),
)
