"""The card of `block_micro_batching`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of BlockMicroBatching."""

    micro_batches: int = setting(
        4, "number of micro-batches that each block divides its batch into; a smaller batch has as many as samples",
        at_least=1,
    )  # fmt: skip
    blocks: str | Sequence[str] = blocks_setting()
    batch_dim: int = setting(
        0, "the batch dimension of the blocks' hidden states; 1 for (sequence, batch, width)", allowed=(0, 1)
    )


def _compiled(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        if chosen.card.phase is Phase.COMPILE:
            return (
                "callback.block_micro_batching runs each block several times within one call, and"
                f" {chosen.choice} compiles that call; write {chosen.removal}, or ~callback.block_micro_batching"
            )
    return None


CARD = Card(
    name="block_micro_batching",
    target="lightning_solo.techniques.block_micro_batching.technique:BlockMicroBatching",
    phase=Phase.SAVED_TENSORS,
    settings=Settings,
    saves="activations inside the blocks, but for those of one block and one micro-batch: blocks x inside becomes"
    " blocks x input + inside / ``micro_batches``. A block's weights are used in one visit per forward and backward,"
    " so streamed ones pass the bus as often as without micro-batches",
    costs="one more forward of the blocks, as activation checkpointing, and smaller kernels. All gradients of a block"
    " exist at a time, those of 16-bit weights in 4 bytes. Code outside the blocks runs on the whole batch",
    numerics="loss and gradients are those of the whole batch within rounding: products of fewer rows, and weight"
    " gradients summed over micro-batches in fp32. Dropout in blocks draws other masks, which backward repeats",
    conflicts="activation checkpointing, which this replaces; compiled blocks; BatchNorm in a block; blocks whose"
    " samples depend on one another, and packed sequences without a batch dimension (refused)",
    reference="Lamy-Poirier 2021, layered gradient accumulation, https://arxiv.org/abs/2106.02679; Yue et al. 2025,"
    " GreedySnake, https://arxiv.org/abs/2512.17570",
    owns=frozenset({"saved_tensors"}),
    solved="micro_batches",
    rules=(_compiled,),
    engines=alike(ROUNDING),
)
