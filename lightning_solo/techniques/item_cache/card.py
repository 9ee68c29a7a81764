"""The card of `item_cache`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.budget import budget_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.units import parse_budget


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ItemCache."""

    budget: int | str = budget_setting("most bytes of cached items, such as 16GiB", parse_budget, "4GiB")
    place: str = setting("memory", "host memory, which workers share, or a temporary file", allowed=("memory", "disk"))
    folder: str | None = setting(None, "for place=disk, the file's folder; null: the system's for temporary files")


CARD = Card(
    name="item_cache",
    target="lightning_solo.techniques.item_cache.technique:ItemCache",
    phase=Phase.ITEMS,
    settings=Settings,
    saves="no memory but time: from the second epoch on, the loading of the data set's items",
    costs="up to ``budget`` bytes of host memory, or of disk; a read and a copy per item",
    numerics="bit-exact for a data set whose items are always the same; random ones are refused",
    conflicts="items that differ from load to load, iterable data sets, loaders other than ``DataLoader``, systems"
    " other than Linux (refused)",
    reference="Mohan et al. 2021, Analyzing and Mitigating Data Stalls in DNN Training, arXiv 2007.06775",
    exact=True,
    planned="left out",
    engines=EVERYWHERE,
)
