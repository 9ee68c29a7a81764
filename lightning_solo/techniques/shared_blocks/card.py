"""The card of `shared_blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.factors import rule_of
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting

OPTION = "callback.shared_blocks"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of SharedBlocks."""

    group: int | None = setting(None, "blocks in a row that share their weights; null: all of a kind", at_least=2)
    start: str = setting(
        "first",
        "first: the weights of the first block; mean: the mean of the blocks' weights",
        allowed=("first", "mean"),
    )
    blocks: str | Sequence[str] = blocks_setting()
    after_fit: str = setting(
        "keep", "keep: the blocks share further; separate: each gets a copy", allowed=("keep", "separate")
    )


CARD = Card(
    name="shared_blocks",
    target="lightning_solo.techniques.shared_blocks.technique:SharedBlocks",
    phase=Phase.ADAPT,  # before FACTORIZE: factors of shared weights are shared
    settings=Settings,
    saves="of each group of blocks all weights, gradients and optimizer states but one block's",
    costs="none in time; a model that was trained with blocks of their own loses much at first",
    numerics="not what training blocks of their own gives: a shared weight gets the sum of its blocks' gradients",
    conflicts="techniques that choose the trained parameters",
    reference="Lan et al. 2019, ALBERT, section 3.1, https://arxiv.org/abs/1909.11942",
    rules=(rule_of(OPTION),),
    caveat=lambda settings: "makes blocks use the same weights",
    on_cpu={"after_fit": "separate"},  # the tests over all cards compare the module's own weights
    engines=answers(
        ddp=ROUNDING,
        fsdp=ROUNDING,
        zero3="it wasn't compared on partitioned weights; write the preset ddp in its place",
    ),
)
