"""The card of `leak_finder`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of LeakFinder."""

    every_n_steps: int = setting(50, "optimizer steps between two looks", at_least=1)
    consecutive: int = setting(3, "looks in a row at which a kind of tensor must have grown", at_least=2)
    min_bytes: int = setting(
        512,
        "growth in bytes per optimizer step below which there is no warning; each tensor counts at least 512",
        at_least=1,
    )


CARD = Card(
    name="leak_finder",
    target="lightning_solo.techniques.leak_finder.technique:LeakFinder",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it observes",
    costs="a walk over all objects of Python's garbage collector every ``every_n_steps`` optimizer steps; a full"
    " collection at the start of a fit and whenever something seems to grow",
    numerics="bit-exact",
    conflicts="none",
    reference="https://docs.python.org/3/library/gc.html#gc.get_referrers",
    exact=True,
    planned="left out",
    engines=EVERYWHERE,
)
