"""The card of `frozen_embeddings`; importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card, Rung
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of FrozenEmbeddings."""

    min_rows: int = setting(256, "rows of the smallest embedding that is frozen", at_least=1)


CARD = Card(
    name="frozen_embeddings",
    target="frozen_embeddings.technique:FrozenEmbeddings",
    phase=Phase.ADAPT,
    settings=Settings,
    saves="of each frozen embedding gradient and optimizer states: with AdamW in fp32 12 of 16 bytes per parameter",
    costs="none; the embeddings stay as they are loaded",
    numerics="not what training all parameters gives: for fine-tuning",
    conflicts="another technique that chooses which parameters are trained",
    reference="Lee et al. 2019, What Would Elsa Do? Freezing Layers During Transformer Fine-Tuning, arXiv 1911.03090",
    owns=frozenset({"trained_parameters"}),
    rung=Rung("frozen embeddings", order=25),
)
