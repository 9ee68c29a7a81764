"""The card of `exact_resume`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EXACT, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ExactResume."""

    fast_forward: bool = setting(
        False,
        "load the batches before the position again and drop them, where a data set or loader determines the order"
        " itself, such as an iterable data set",
    )


CARD = Card(
    name="exact_resume",
    target="lightning_solo.techniques.exact_resume.technique:ExactResume",
    phase=Phase.POSITION,
    settings=Settings,
    saves="nothing; a run that is resumed from any checkpoint ends with the bits of the undisturbed run",
    costs="random states and loader positions in each checkpoint, and within an accumulation window its gradients",
    numerics="bit-exact",
    conflicts="``DataLoader(in_order=False)``",
    reference="MosaicML Composer's resumption, docs.mosaicml.com (save points); Lightning's issues 19764 and 20550",
    exact=True,
    planned="left out",
    engines=alike(EXACT),
)
