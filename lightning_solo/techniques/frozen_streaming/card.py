"""The card of `frozen_streaming`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of FrozenStreaming."""

    blocks: str | Sequence[str] = blocks_setting()
    window: int = setting(
        2, "buffers on the device, each as large as the largest block; 3 copies two blocks ahead", at_least=2
    )


def _not_by_blocks(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        if chosen.card.phase is Phase.COMPILE:
            why = "compiles the blocks, which load their weights as they run"
        elif chosen.card.group == "strategy":
            why = "stores the weights in its own way"
        else:
            continue
        return (
            f"callback.frozen_streaming keeps frozen weights on the host, and {chosen.choice} {why}; write"
            f" {chosen.removal}, or ~callback.frozen_streaming"
        )
    return None


CARD = Card(
    name="frozen_streaming",
    target="lightning_solo.techniques.frozen_streaming.technique:FrozenStreaming",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="the device memory of the blocks' frozen weights, except for ``window`` blocks",
    costs="page-locked host memory for these weights; each block crosses the bus for forward and again for backward of"
    " each micro-batch, while the block before it is computed",
    numerics="bit-exact: the same numbers, at other places",
    conflicts="compiled blocks, and strategies that store the weights in their own way (refused)",
    reference="Ren et al. 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840; Pudipeddi et al. 2020, layer-to-layer"
    " execution, https://arxiv.org/abs/2002.05645",
    exact=True,
    rules=(_not_by_blocks,),
    engines=alike("it stores weights in its own way on one device"),
)
