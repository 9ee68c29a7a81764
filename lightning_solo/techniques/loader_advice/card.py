"""The card of `loader_advice`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of LoaderAdvice."""

    min_share: float = setting(
        0.02,
        "share of the time in training below which an option of the loader isn't named",
        check=lambda share: (
            None if 0 <= share < 1 else "allowed is a share of the time, from 0 to below 1, such as 0.02"
        ),
    )


CARD = Card(
    name="loader_advice",
    target="lightning_solo.techniques.loader_advice.technique:LoaderAdvice",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it observes",
    costs="eight clock readings per batch, on a GPU five events; one synchronisation at the end of a fit; measured by"
    " examples/measure_loader_advice.py",
    numerics="bit-exact",
    conflicts="none",
    reference="https://docs.pytorch.org/docs/stable/data.html (workers, memory pinning)",
    exact=True,
    planned="left out",
    engines=EVERYWHERE,
)
