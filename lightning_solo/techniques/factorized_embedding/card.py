"""The card of `factorized_embedding`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.factors import FactorSettings, rule_of
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import setting

OPTION = "callback.factorized_embedding"


@dataclass(frozen=True)
class Settings(FactorSettings):
    """Arguments of FactorizedEmbedding."""

    embedding: str | None = setting(None, "name of the embedding, or its end; null: the largest one")


CARD = Card(
    name="factorized_embedding",
    target="lightning_solo.techniques.factorized_embedding.technique:FactorizedEmbedding",
    phase=Phase.FACTORIZE,
    settings=Settings,
    saves="of an embedding of V x H numbers all but V x E + E x H, with gradients and optimizer states; E is the rank",
    costs="a singular value decomposition of the embedding at the start; a product with E x H numbers in each forward",
    numerics="the start is the nearest matrix of this rank; a tied head computes with the same factors",
    conflicts="techniques that choose the trained parameters, and quantization-aware training",
    reference="Lan et al. 2019, ALBERT, section 3.1, https://arxiv.org/abs/1909.11942",
    rules=(rule_of(OPTION),),
    caveat=lambda settings: "replaces the embedding by a smaller one",
    on_cpu={"rank": 8, "after_fit": "merge"},  # the tests over all cards compare the module's own weights
    planned="lightning_solo.cards.factors:planned",
    engines=alike(ROUNDING),
)
