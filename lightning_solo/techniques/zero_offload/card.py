"""The card of the strategy `zero_offload`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_solo.cards.card import Card, Requirement, Rung
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import PresetError
from lightning_solo.techniques.zero_offload.footprint import ZeroStates
from lightning_solo.zero.config import merge, trains_wrong, zero_config


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ZeroOffloadStrategy."""

    stage: int = setting(2, "2 keeps the 16-bit weights on the device, 3 partitions them too", allowed=(2, 3))
    offload_parameters: bool = setting(False, "keep the weights on the host, fetched block by block; needs stage 3")
    nvme_path: str | None = setting(None, "folder on a local SSD for optimizer states, and weights; needs stage 3")
    pin_memory: bool = setting(True, "page-locked memory for the host's copies, which makes the transfers fast")
    host_optimizer: str = setting(
        "auto",
        "auto: yours, AdamW fused; torch: yours, unchanged; deepspeed: its C++ version, built once",
        allowed=("auto", "deepspeed", "torch"),
    )
    config: Mapping[str, Any] | str | None = setting(None, "DeepSpeed's own configuration: a mapping or a JSON file")
    save_engine_directory: bool = setting(False, "write DeepSpeed's own checkpoint beside each file")
    exclude_frozen_parameters: bool = setting(False, "leave weights that are not trained out of checkpoints")
    allow_cpu: bool = setting(False, "run the engine on the CPU for tests and trials; it saves nothing there")

    def _check_together(self) -> None:
        if self.stage == 2 and (self.offload_parameters or self.nvme_path is not None):
            name = "offload_parameters" if self.offload_parameters else "nvme_path"
            raise PresetError(f"zero_offload.{name} needs stage=3, and stage=2 was given; write strategy.stage=3")
        if self.nvme_path is not None and not self.nvme_path.strip():
            raise PresetError("zero_offload.nvme_path='': write a folder on a local SSD, or null for none")

    def engine_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration for these settings; raises as `zero.config.merge`."""
        ours = zero_config(
            self.stage,
            offload_parameters=self.offload_parameters,
            nvme_path=self.nvme_path,
            pin_memory=self.pin_memory,
        )
        return merge(ours, self.config)


def _double_precision(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.precision == "64-true":
        return "strategy=zero_offload and precision=64-true: DeepSpeed has no 64-bit mode; write precision=32-true"
    return None


def _wrong_training(settings: Settings, configuration: Configuration) -> str | None:
    section = settings.config.get("zero_optimization") if isinstance(settings.config, Mapping) else None
    return trains_wrong(section) if isinstance(section, Mapping) else None  # `merge` checks a file


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan model states by the engine's layout, with all weights in low precision, without autocast."""
    precision = {"bf16-mixed": "bf16-true", "16-mixed": "16-true"}.get(tracing.precision, tracing.precision)
    return replace(tracing, precision=precision, attached=None, states=ZeroStates(settings))


CARD = Card(
    name="zero_offload",
    target="lightning_solo.techniques.zero_offload.technique:ZeroOffloadStrategy",
    group="strategy",
    phase=Phase.STATES,
    settings=Settings,
    saves="on the device the optimizer's states (AdamW: 8 bytes per parameter), under bf16 also the fp32 master (4),"
    " and the gradients (4, under bf16 2) but for two buckets; stage 3 with ``offload_parameters`` the weights too",
    costs="host memory per parameter: master 4, gradient 4, states 4 + 4, a copy of the weights 2 (fp32: 4); with"
    " accumulation, and at stage 3 always, 2 (4) more; what is page-locked is rounded up to powers of two. The step"
    " runs on the CPU, and gradients and weights cross the bus once per optimizer step",
    numerics='equal to plain AdamW within rounding; bit-exact in fp32 with ``host_optimizer="torch"`` and no clipping.'
    " `bf16-mixed` here means bf16 weights with an fp32 master, not autocast. A parameter that a step doesn't use has a"
    " gradient of zero here, and is skipped by plain AdamW.",
    conflicts="optimizers that look at a parameter's shape, clipping by value, a compiled LightningModule",
    reference="Ren et al. 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840; Rajbhandari et al. 2021, ZeRO-Infinity,"
    " https://arxiv.org/abs/2104.07857",
    owns=frozenset({"optimizer_states", "gradients", "weights"}),
    frees=lambda settings: (
        frozenset({"gradients", "repeated_backward"}) | ({"weights"} if settings.stage == 3 else frozenset())
    ),
    rules=(_double_precision, _wrong_training),
    requires=(
        Requirement("check", "strategy=zero_offload", "lightning_solo.zero.process:unsupported_deepspeed"),
        Requirement(
            "check",
            "strategy.nvme_path needs DeepSpeed's async_io",
            "lightning_solo.zero.extension:disk_access_lacks",
            when=lambda settings: settings.nvme_path is not None,
        ),
        Requirement(
            "cuda",
            "strategy=zero_offload needs a CUDA device: it moves optimizer states from it to the host; without one use"
            " the preset 'checkpointing', or to try the engine out strategy.allow_cpu=true",
            when=lambda settings: not settings.allow_cpu,
        ),
    ),
    on_cpu={"allow_cpu": True, "host_optimizer": "torch"},
    rung=Rung("zero_offload", order=50),
    planned="lightning_solo.techniques.zero_offload.card:planned",
    footprint="lightning_solo.techniques.zero_offload.footprint:footprint",
)
