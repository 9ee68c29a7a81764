"""The card of `quantization`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, names_or, setting

LINEAR = "linear"
"""Selects every linear layer but output heads."""


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Quantization."""

    bits: int | str = setting(
        4, "bits of a weight; fp8: numbers of torch.float8_e4m3fn", allowed=(2, 3, 4, 5, 6, 7, 8, "fp8")
    )
    group_size: int = setting(32, "inputs of a layer whose weights share a scale; 0: a scale per row", at_least=0)
    activations: str = setting(
        "unchanged", "int8: each token of a layer's input is rounded to 8 bits, too", allowed=("unchanged", "int8")
    )
    layers: str | Sequence[str] = setting(
        LINEAR,
        "linear: all linear layers but output heads, attention of torch, and experts; or patterns of names, as [mlp]",
        check=names_or(LINEAR, "patterns of names", "[mlp]"),
    )
    start_step: int = setting(0, "optimizer steps before weights are rounded", at_least=0)


def _others(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        if chosen.card.name in ("adapters", "low_rank", "factorized_embedding"):
            return (
                f"callback.quantization and {chosen.choice}: merging what it adds would change the rounded weights;"
                f" write {chosen.removal}, or ~callback.quantization, and quantize after training: lightning-solo"
                " export --format quantized"
            )
    return None


CARD = Card(
    name="quantization",
    target="lightning_solo.techniques.quantization.technique:Quantization",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="bytes after training: of each exported weight at 4 bits in groups of 32 numbers 3.44 of 4 bytes; in training"
    " nothing",
    costs="rounding of each weight in each forward, and one more copy of it, which autograd keeps until backward",
    numerics="not exact: forward computes with weights of 2 to 8 bits, and the rounding's gradient is taken as 1",
    conflicts="adapters, factorized layers, weights in 4 or 8 bits, and another form of the layers' products",
    reference="Jacob et al. 2018, https://arxiv.org/abs/1712.05877; Bengio et al. 2013, straight-through estimator,"
    " https://arxiv.org/abs/1308.3432",
    owns=frozenset({"products"}),
    rules=(_others,),
    caveat=lambda settings: "trains for a model in few bits",
    engines=alike(ROUNDING),
)
