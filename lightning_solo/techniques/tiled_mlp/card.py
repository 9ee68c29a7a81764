"""The card of `tiled_mlp`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of TiledMlp."""

    parts: str | Sequence[str] = blocks_setting("the feed-forward parts of any model", "LlamaMLP")
    tile_tokens: int = setting(
        4096, "tokens of a micro-batch that are computed at a time; those of all its sequences are counted", at_least=1
    )


def _nothing_left_to_compile(settings: Settings, configuration: Configuration) -> str | None:
    recomputing = [chosen for chosen in configuration.techniques if "saved_tensors" in chosen.owned()]
    compiling = [chosen for chosen in configuration.techniques if chosen.card.phase is Phase.COMPILE]
    if not recomputing or not compiling:
        return None
    one, other = recomputing[0], compiling[0]
    return (
        f"callback.tiled_mlp isn't compiled, and torch compiles no recomputed block ({one.choice}) of which a part"
        f" isn't, so {other.choice} would do nothing; write {other.removal}, or ~callback.tiled_mlp"
    )


CARD = Card(
    name="tiled_mlp",
    target="lightning_solo.techniques.tiled_mlp.technique:TiledMlp",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="activations inside the feed-forward parts, several times tokens x 4 widths, except for ``tile_tokens``"
    " tokens; in recomputed blocks too",
    costs="one more forward of these parts in backward; they aren't compiled; with 16-bit weights 4 bytes per weight of"
    " a part while its backward runs",
    numerics="products of fewer rows, and weight gradients summed over tiles in fp32: differences are within the"
    " precision's rounding",
    conflicts="parts that mix tokens or use other modules' parameters (refused), and weights that are gathered only for"
    " a forward (ZeRO stage 3)",
    reference="Bekman et al. 2025 (Arctic Long Sequence Training), arXiv 2506.13996",
    reads=frozenset({"weights"}),
    rules=(_nothing_left_to_compile,),
    on_cpu={"tile_tokens": 2},
    engines=answers(
        ddp=ROUNDING,
        fsdp=ROUNDING,
        zero3="it needs whole weights, which the engine gathers only while forward and backward run",
    ),
)
