"""The card of `length_bucketing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.lengths import length_setting
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of LengthBucketing."""

    length: str | Callable[[Any], int] = length_setting()  # noqa: RUF009 - the default is a string
    max_tokens: int | None = setting(
        None, "largest number of tokens in a batch, padding included, instead of the loader's batch size", at_least=1
    )
    seed: int = setting(0, "of the order of the batches", at_least=0)


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the given batch unchanged; the plan names this as an assumption."""
    assumption = "length_bucketing: planned for the given batch; give one of the longest items"
    return tracing.assuming(assumption, attached=None)


CARD = Card(
    name="length_bucketing",
    target="lightning_solo.techniques.length_bucketing.technique:LengthBucketing",
    phase=Phase.BATCHES,
    settings=Settings,
    saves="the arithmetic and activations of padding: items of similar length share a batch",
    costs="each item of the data set is read once before the fit; with a column of lengths only that column",
    numerics="every item comes once per epoch, with other neighbours than in random batches",
    conflicts="iterable data sets, a batch sampler or sampler of your own, a loader that keeps its position itself (all"
    " refused); other techniques that make the batches",
    reference="Khomenko et al. 2016, arXiv 1708.05604",
    owns=frozenset({"batches"}),
    planned="lightning_solo.techniques.length_bucketing.card:planned",
    engines=alike(ROUNDING),
)
