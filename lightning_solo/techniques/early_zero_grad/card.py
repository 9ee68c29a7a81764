"""The card of `early_zero_grad`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EXACT, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of EarlyZeroGrad: none."""


CARD = Card(
    name="early_zero_grad",
    target="lightning_solo.techniques.early_zero_grad.technique:EarlyZeroGrad",
    phase=Phase.STEP,
    settings=Settings,
    saves="the gradients of the previous window during the forward that begins a window, if forward sets the peak: 4"
    " bytes per parameter in fp32, 2 in bf16",
    costs="none",
    numerics="bit-exact: the same calls, in another order",
    conflicts="manual optimization (refused), in which the module zeroes gradients itself; techniques that free"
    " gradients in backward; a ``training_step`` that reads the previous step's ``.grad``",
    reference="Lightning's order is forward, zero_grad, backward:"
    " https://lightning.ai/docs/pytorch/stable/common/optimization.html",
    exact=True,
    reads=frozenset({"gradients"}),
    engines=answers(ddp=EXACT, fsdp=EXACT, zero3="the engine keeps the gradients"),
)
