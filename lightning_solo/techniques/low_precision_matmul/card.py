"""The card of `low_precision_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


@dataclass(frozen=True)
class Format:
    """The hardware that a format needs."""

    capability: tuple[int, int]  # smallest CUDA compute capability
    geforce: bool = False  # whether only GeForce cards gain speed


FORMATS = {
    "float8_tensorwise": Format((8, 9)),
    "float8_rowwise": Format((8, 9)),
    "float8_rowwise_with_gw_hp": Format((8, 9)),
    "mxfp8": Format((10, 0)),
    "nvfp4": Format((10, 0)),
    "int8": Format((8, 0)),
    "fp16_accumulate": Format((7, 5), geforce=True),  # other cards sum in fp32 as fast
}


def formats_of(capability: tuple[int, int], label: str) -> list[str]:
    """Return the formats in which a device of a compute capability and a driver's name multiplies.

    >>> formats_of((8, 0), "NVIDIA A100-SXM4-40GB"), formats_of((8, 6), "NVIDIA GeForce RTX 3090")
    (['int8'], ['int8', 'fp16_accumulate'])
    """
    able = {name: each for name, each in FORMATS.items() if capability >= each.capability}
    return [name for name, each in able.items() if "GeForce" in label or not each.geforce]


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of LowPrecisionMatmul."""

    format: str = setting(
        "float8_tensorwise",
        "format of products: float8 with a scale per tensor (fastest) or row, with_gw_hp: weights' gradients in the"
        " original type; mxfp8; nvfp4; int8; fp16_accumulate: sums in fp16",
        allowed=tuple(FORMATS),
    )
    blocks: str | Sequence[str] = blocks_setting()
    allow_cpu: bool = setting(
        False, "run on the CPU, where all but int8 is emulated, for tests and for trying: it is slow"
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan it on the CPU; products in 8 or 4 bits at the speed of bf16."""
    assumption = (
        f"low_precision_matmul: products in {settings.format} are planned with the speed of those in bf16,"
        " and their factors with the bytes of their emulation; a GPU that has them takes less of both"
    )
    attached = replace(settings, allow_cpu=True)
    if settings.format == "fp16_accumulate":
        return replace(tracing, attached=attached)
    return tracing.assuming(assumption, attached=attached)


CARD = Card(
    name="low_precision_matmul",
    target="lightning_solo.techniques.low_precision_matmul.technique:LowPrecisionMatmul",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="time: devices multiply 8-bit numbers up to twice as fast as bf16, 4-bit numbers up to four times, and"
    " GeForce cards fp16 with fp16 sums up to twice; and under `bf16-mixed` the layers' bf16 weight copies, 2 bytes per"
    " parameter",
    costs="scales and rounding for each product: passes over memory that only a compiler fuses (preset compile);"
    " without it, or with narrow layers, a step may take longer",
    numerics="not exact: factors are rounded to 3 bits of mantissa (float8, mxfp8; 2 for gradients with tensorwise), 1"
    " bit (nvfp4), 127 steps (int8) or 10 bits (fp16_accumulate, its sums too); weights and optimizer keep their type",
    conflicts="none; output head, embeddings, and layers with sizes that 16 doesn't divide (mxfp8, nvfp4: 32) are left"
    " out; the log names such layers",
    reference="Micikevicius et al. 2022, FP8, https://arxiv.org/abs/2209.05433; Xi et al. 2024, Jetfire,"
    " https://arxiv.org/abs/2403.12422; OCP, Microscaling Formats (MX) 1.0; Mishra et al. 2025, MXFP8,"
    " https://arxiv.org/abs/2506.08027; NVIDIA et al. 2025, NVFP4, https://arxiv.org/abs/2509.25149; torchao,"
    " https://docs.pytorch.org/ao/stable/workflows/training.html",
    owns=frozenset({"products"}),
    requires=(
        Requirement(
            "package",
            "callback.low_precision_matmul.format={format} multiplies by torchao; write"
            " callback.low_precision_matmul.format=int8, or install it",
            "torchao>=0.18,<0.19",  # private names of 0.18 are used (nn/low_precision.py)
            when=lambda settings: settings.format.startswith("float8"),
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
    engines=alike(ROUNDING),
)
