"""The card of `low_rank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.factors import FactorSettings, rule_of
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import setting

OPTION = "callback.low_rank"


@dataclass(frozen=True)
class Settings(FactorSettings):
    """Arguments of LowRank."""

    layers: Sequence[str] | None = setting(
        None, "patterns of names of parts or layers, as [mlp]; null: all linear layers but output heads and frozen ones"
    )


CARD = Card(
    name="low_rank",
    target="lightning_solo.techniques.low_rank.technique:LowRank",
    phase=Phase.FACTORIZE,
    settings=Settings,
    saves="weights, gradients and optimizer states: a layer of out x in numbers gets rank x (out + in)",
    costs="a singular value decomposition of each layer at the start; a second, small product in each forward",
    numerics="the start is the nearest matrix of this rank; at full rank it would be the weight, but for rounding",
    conflicts="techniques that choose the trained parameters, and quantization-aware training",
    reference="Eckart and Young 1936; Khodak et al. 2021, https://arxiv.org/abs/2105.01029",
    rules=(rule_of(OPTION),),
    caveat=lambda settings: "replaces linear layers by smaller ones",
    on_cpu={"rank": 8, "after_fit": "merge"},  # the tests over all cards compare the module's own weights
    planned="lightning_solo.cards.factors:planned",
    engines=alike(ROUNDING),
)
