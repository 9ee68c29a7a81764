"""The card of `low_precision_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_solo.cards.arguments import setting
from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.tracing import Tracing

FORMATS = {
    "float8_tensorwise": (8, 9),
    "float8_rowwise": (8, 9),
    "float8_rowwise_with_gw_hp": (8, 9),
    "int8": (8, 0),
}
"""Format -> the least compute capability of CUDA devices that multiply in it."""


def formats_of(capability: tuple[int, int]) -> list[str]:
    """Return the formats in which devices of a compute capability multiply.

    >>> formats_of((8, 6)), len(formats_of((9, 0)))
    (['int8'], 4)
    """
    return [name for name, least in FORMATS.items() if capability >= least]


@dataclass(frozen=True)
class Settings:
    """Arguments of LowPrecisionMatmul."""

    format: str = setting(
        "float8_tensorwise",
        "of products: float8 with a scale per tensor (fastest) or row; with_gw_hp: weights' gradients as before; int8",
        allowed=tuple(FORMATS),
    )
    blocks: str | Sequence[str] = blocks_setting()
    allow_cpu: bool = setting(False, "run on the CPU, where float8 is emulated, for tests and for trying: it is slow")


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan it on the CPU, with products in the speed of bf16."""
    assumption = (
        f"low_precision_matmul: products in {settings.format} are planned with the speed of those in bf16, and"
        " float8's factors with the bytes of its emulation; a GPU that has them takes less of both"
    )
    node = {**(tracing.node or {}), "allow_cpu": True}
    return replace(tracing, node=node, assumptions=(*tracing.assumptions, assumption))


CARD = Card(
    name="low_precision_matmul",
    target="lightning_solo.techniques.low_precision_matmul.technique:LowPrecisionMatmul",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="time: devices multiply 8-bit numbers up to twice as fast as bf16; and under `bf16-mixed` the copies of the"
    " layers' weights in bf16, 2 bytes per parameter",
    costs="finding scales and rounding, in each product: passes over memory that only a compiler fuses (preset"
    " compile); without it, or with narrow layers, a step may take longer",
    numerics="not exact: factors are rounded to 3 bits of mantissa (float8; 2 for gradients with tensorwise), or to 127"
    " steps (int8), about 4 % and 1 % of a product; its sums, weights and optimizer keep their type",
    conflicts="none; layers whose sizes don't divide by 16 are left out and named, the output head and embeddings too",
    reference="Micikevicius et al. 2022, FP8, https://arxiv.org/abs/2209.05433; Xi et al. 2024, Jetfire,"
    " https://arxiv.org/abs/2403.12422; torchao, https://docs.pytorch.org/ao/stable/workflows/training.html",
    requires=(
        Requirement(
            "package",
            "callback.low_precision_matmul.format={format} multiplies by torchao; write format: int8, or install it",
            "torchao>=0.18,<0.19",  # private names of 0.18 are used (nn/low_precision.py)
            when=lambda settings: settings.format != "int8",
        ),
        Requirement(
            "cuda",
            "callback.low_precision_matmul needs a CUDA device that multiplies in {format}; to try the numerics on a"
            " CPU write callback.low_precision_matmul.allow_cpu=true",
            when=lambda settings: not settings.allow_cpu,
        ),
    ),
    on_cpu={"format": "int8", "allow_cpu": True},
    planned="lightning_solo.techniques.low_precision_matmul.card:planned",
)
