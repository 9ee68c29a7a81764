"""The card of `activation_offloading`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.cards.budget import budget_setting, bytes_or_share
from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import ConflictError

BLOCK_INPUTS, ALL, DISK = "block_inputs", "all", "disk"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ActivationOffloading."""

    mode: str = setting(
        BLOCK_INPUTS,
        "block_inputs: the inputs that recomputed blocks keep; all: all tensors that forward saves, which the bus may "
        "slow down; disk: block_inputs, to a local SSD through four buffers on the host",
        allowed=(BLOCK_INPUTS, ALL, DISK),
    )
    min_offload_bytes: int = setting(
        2**20, "smaller tensors stay on the device: a copy takes some 10 microseconds however small it is", at_least=1
    )
    keep_on_device: int | float | str | None = budget_setting(
        "of the tensors to be moved, those saved last stay on the device: as many bytes, as 2GiB, at least 1 MiB; or a "
        "share from 0 to 1 of a micro-batch's bytes; null: those on their way to the host"
    )
    folder: str | None = setting(
        None,
        "for mode=disk, a folder on a local SSD; null: the system's for temporary files. The file is gone after the "
        "fit, also if the process is killed",
    )
    allow_cpu: bool = setting(False, "move to a second buffer on the CPU, for tests and for trying: it saves nothing")

    def _check_together(self) -> None:
        if self.folder is not None and self.mode != DISK:
            raise ConflictError(
                f"activation_offloading: folder={self.folder!r} needs mode=disk, and mode={self.mode}; write"
                " callback.activation_offloading.mode=disk, or callback.activation_offloading.folder=null"
            )


def _nothing_recomputed(settings: Settings, configuration: Configuration) -> str | None:
    if settings.mode == ALL or any("saved_tensors" in chosen.owned() for chosen in configuration.techniques):
        return None
    return (
        f"callback.activation_offloading.mode={settings.mode} moves the inputs of recomputed blocks, and no block is"
        " recomputed; write +callback=activation_checkpointing, or callback.activation_offloading.mode=all"
    )


def _two_budgets(settings: Settings, configuration: Configuration) -> str | None:
    budgets = {
        chosen.option: getattr(chosen.settings, "budget", None)
        for chosen in configuration.techniques
        if "saved_tensors" in chosen.owned()
    }
    in_bytes = [
        option for option, budget in budgets.items() if budget is not None and isinstance(bytes_or_share(budget), int)
    ]
    if settings.keep_on_device is None or not in_bytes:
        return None
    return (
        f"callback.activation_offloading.keep_on_device={settings.keep_on_device} and {in_bytes[0]}.budget="
        f"{budgets[in_bytes[0]]} both decide what fits on the device; write"
        " callback.activation_offloading.keep_on_device=null"
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan it on the CPU, where copies within its memory represent those to the host."""
    # a limit in bytes keeps a larger share of small micro-batches
    keeps_bytes = settings.keep_on_device is not None and isinstance(bytes_or_share(settings.keep_on_device), int)
    attached = replace(settings, allow_cpu=True, folder=None)
    keeps_up = ["the disk keeps up with offloaded activations"] * (settings.mode == DISK)
    return tracing.assuming(*keeps_up, attached=attached, scales=tracing.scales and not keeps_bytes)


CARD = Card(
    name="activation_offloading",
    target="lightning_solo.techniques.activation_offloading.technique:ActivationOffloading",
    phase=Phase.SAVED_TENSORS,
    settings=Settings,
    saves="with recomputed blocks, their inputs: per block 2 (bf16) or 4 bytes per token and unit of width, except for"
    " one or two blocks; with ``mode=all`` nearly everything that forward saves",
    costs="as many bytes of page-locked host memory; with ``mode=disk``, of a local disk, and four block inputs on the"
    " host. Each byte crosses the bus once in each direction, in parallel with the computation: block inputs cost no"
    " time from a few thousand tokens per micro-batch on, ``mode=all`` does; with ``keep_on_device`` only the bytes"
    " that don't fit are copied",
    numerics="bit-exact: the same bytes return",
    conflicts="in-place changes of a saved tensor (refused, as without it); with ``block_inputs`` and ``disk`` a model"
    " without recomputed blocks (refused)",
    reference="Ren et al. 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840;"
    " https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks",
    exact=True,
    rules=(_nothing_recomputed, _two_budgets),
    requires=(
        Requirement(
            "cuda",
            "callback.activation_offloading needs a CUDA device: it moves activations from it to the host; without one"
            " use the preset 'checkpointing', or to try it out callback.activation_offloading.allow_cpu=true",
            when=lambda settings: not settings.allow_cpu,
        ),
    ),
    solved="moving",
    on_cpu={"mode": ALL, "min_offload_bytes": 256, "allow_cpu": True},
    planned="lightning_solo.techniques.activation_offloading.card:planned",
    engines=EVERYWHERE,
)
