"""The card of the strategy `zero3`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import several_devices
from lightning_solo.cards.footprint import ELEMENT_BYTES
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import STATES, Ranks, Tracing
from lightning_solo.zero.config import BUCKET_ELEMENTS, zero_config


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ZeroStageStrategy."""

    stage: int = setting(3, "3 partitions weights, gradients and states, 2 all but the weights", allowed=(2, 3))
    exclude_frozen_parameters: bool = setting(False, "leave weights that are not trained out of checkpoints")
    timeout_s: int = setting(1800, "seconds after which a process that waits for others fails", at_least=1)

    def engine_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration for these settings."""
        config = zero_config(self.stage)
        del config["zero_optimization"]["offload_optimizer"]
        return config


def _double_precision(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.precision == "64-true":
        return "strategy=zero3 and precision=64-true: DeepSpeed has no 64-bit mode; write precision=32-true"
    return None


REUSED_ELEMENTS = 500_000_000
"""Weights that stay gathered from forward to backward: `stage3_max_reuse_distance` is 1e9 elements, there and back."""


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan one process's shards, what it gathers, the engine's buckets, and the step of its fp32 master."""
    precision = {"bf16-mixed": "bf16-true", "16-mixed": "16-true"}.get(tracing.precision, tracing.precision)
    element = ELEMENT_BYTES.get(precision, 4)
    ranks = Ranks(
        STATES if settings.stage == 3 else STATES - {"weights"},
        widening=4 // element,
        bucket_bytes=element * BUCKET_ELEMENTS,
        kept_bytes=element * REUSED_ELEMENTS if settings.stage == 3 else 0,
    )
    return replace(tracing, precision=precision, attached=None, ranks=ranks)


CARD = Card(
    name="zero3",
    target="lightning_solo.techniques.zero3.technique:ZeroStageStrategy",
    group="strategy",
    engine="zero3",
    phase=Phase.STATES,
    settings=Settings,
    saves="on n devices 1 - 1/n of weights, gradients and optimizer states, but for what is gathered and two buckets",
    costs="communication: weights are gathered in forward and in backward; with 16-bit weights an fp32 master",
    numerics="a step on n devices equals a step of one device on the n batches together, within rounding;"
    " `bf16-mixed` here means bf16 weights with an fp32 master, not autocast",
    conflicts="what `zero_offload` refuses, and what needs whole weights in forward or backward",
    reference="Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054",
    owns=frozenset({"optimizer_states", "gradients", "weights"}),
    frees=lambda settings: (
        frozenset({"gradients", "repeated_backward"}) | ({"weights"} if settings.stage == 3 else frozenset())
    ),
    rules=(_double_precision,),
    requires=(Requirement("check", "strategy=zero3", "lightning_solo.zero.process:unsupported_deepspeed"),),
    caveat=several_devices,
    planned="lightning_solo.techniques.zero3.card:planned",
)
