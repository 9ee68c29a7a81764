"""The card of `packing`."""

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
    """Arguments of Packing."""

    capacity: int | None = setting(None, "tokens of a row; null: of the longest document", at_least=1)
    rows: int | None = setting(
        None, "rows of a batch; null: as many as hold about the loader's batch of documents", at_least=1
    )
    length: str | Callable[[Any], int] = length_setting()  # noqa: RUF009 - the default is a string
    seed: int = setting(0, "of the order of the batches", at_least=0)


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the given batch unchanged; the plan names this as an assumption."""
    most = settings.capacity or "the longest document's"
    assumption = f"packing: planned for the given batch; a packed row has at most {most} tokens"
    return tracing.assuming(assumption, attached=None)


CARD = Card(
    name="packing",
    target="lightning_solo.techniques.packing.technique:Packing",
    phase=Phase.BATCHES,
    settings=Settings,
    saves="the arithmetic and activations of padding: several documents share a row",
    costs="each document is read once before the fit; with a column of lengths only that column. To keep documents"
    " apart some attention kernels need a mask of tokens x tokens",
    numerics="loss and gradients equal those of the same documents padded, if the loss is the mean over labels; the"
    " first batch tests with two documents that they don't see one another",
    conflicts="modules in which documents see one another, detected in the first batch; shifted labels; manual"
    " optimization; iterable data sets, a batch sampler or sampler of your own, a loader that keeps its position"
    " itself, several loaders (all refused); other techniques that make the batches",
    reference="Ding et al. 2024, arXiv 2404.10830, section 3.2",
    owns=frozenset({"batches"}),
    planned="lightning_solo.techniques.packing.card:planned",
    engines=alike(ROUNDING),
)
