"""The card of `quantized_base`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, names_or, setting

FROZEN = "frozen"
"""Selects every frozen linear layer."""


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of QuantizedBase."""

    format: str = setting(
        "nf4",
        "nf4: 4 bits with double quantization, 0.516 bytes per weight; int8: 8 bits with a scale per row",
        allowed=("nf4", "int8"),
    )
    layers: str | Sequence[str] = setting(
        FROZEN,
        "frozen: all frozen linear layers but output heads; or patterns of names, as [mlp]",
        check=names_or(FROZEN, "patterns of names", "[mlp]"),
    )
    embeddings: str = setting(
        "unchanged",
        "frozen embeddings stay as they are, are stored in 8 bits, or stay on the host, from where a batch's rows are"
        " copied to the device",
        allowed=("unchanged", "int8", "host"),
    )
    head: str = setting(
        "unchanged",
        "a frozen output head stays as it is, is stored in 8 bits, or stays on the host and is copied in parts; where"
        " it is tied to an embedding, both settings must be the same",
        allowed=("unchanged", "int8", "host"),
    )


CARD = Card(
    name="quantized_base",
    target="lightning_solo.techniques.quantized_base.technique:QuantizedBase",
    phase=Phase.STORE,
    settings=Settings,
    saves="of each frozen weight in bf16 1.48 of 2 bytes, in fp32 3.48 of 4; with int8 1 of 2, or 3 of 4; with host"
    " all",
    costs="time: each product first dequantizes its weight, in forward and again in backward; one dequantized weight at"
    " a time takes memory. With embeddings=host each forward waits for its tokens; with head=host each chunk of tokens"
    " copies the head to the device, in forward and again for gradients",
    numerics="not exact: nf4 rounds weights to 16 levels in blocks of 64, a relative error of 9 %, int8 of about 0.9 %."
    " The products are those of the rounded weights, to the bit",
    conflicts="training the quantized weights themselves",
    reference="Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314; Dettmers et al. 2022, LLM.int8(),"
    " https://arxiv.org/abs/2208.07339",
    owns=frozenset({"products"}),
    reads=frozenset({"weights"}),
    caveat=lambda settings: "rounds the frozen weights",
    requires=(
        Requirement(
            "package",
            "callback.quantized_base.format={format} uses bitsandbytes' operators; write"
            " callback.quantized_base.format=int8, or install it",
            "bitsandbytes>=0.50",
            when=lambda settings: settings.format == "nf4",
        ),
    ),
    engines=answers(
        ddp=ROUNDING,
        fsdp=ROUNDING,
        zero3="it wasn't compared on partitioned weights; write the preset ddp in its place",
    ),
)
