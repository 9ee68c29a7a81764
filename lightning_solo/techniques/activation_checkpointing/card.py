"""The card of `activation_checkpointing`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_solo.cards.blocks import HOST_INPUT, MODES, OFFLOAD, blocks_setting
from lightning_solo.cards.budget import budget_setting, bytes_or_share
from lightning_solo.cards.card import Card, Rung
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import EXACT, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import ConflictError

NOTHING, ALL_PRODUCTS = "nothing", "products"


def _not_operators(keep: str | Sequence[str]) -> str | None:
    if isinstance(keep, str):
        words = keep in (NOTHING, ALL_PRODUCTS)
        return None if words else "write 'nothing', 'products' or a list of operators, as [aten.mm, aten.addmm]"
    return None if keep and all("." in name for name in keep) else "write operators with their library, as [aten.mm]"


def _wrong_modes(modes: Mapping[str, Sequence[str]] | None) -> str | None:
    if modes is None:
        return None
    example = "as {keep: [blocks.2], recompute: [blocks.0, blocks.1]}"
    if wrong := [mode for mode in modes if mode not in MODES]:
        return f"no mode {wrong[0]!r}; write lists of blocks for {', '.join(MODES)}, {example}"
    names = Counter(name for listed in modes.values() for name in listed)
    if twice := [name for name, count in names.items() if count > 1]:
        return f"{twice[0]} is listed {names[twice[0]]} times; list each block once"
    return None if names else f"write at least one block, {example}, or null"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ActivationCheckpointing."""

    blocks: str | Sequence[str] = blocks_setting()
    every_k: int = setting(
        1, "wrap blocks 0, k, 2k, ...; 2 keeps half of the activations and costs half of the recomputation", at_least=1
    )
    keep: str | Sequence[str] = setting(
        NOTHING,
        "results inside the blocks that are kept instead of recomputed: nothing; products (of matrices, "
        "convolutions and attention, which take nearly all of the time); or operators, as [aten.mm]",
        check=_not_operators,
    )
    budget: int | float | str | None = budget_setting(
        "recompute only as much as needed, chosen by bytes and FLOPs of each block. Bytes, as 6GiB: the peak of a "
        "training step on the device, model states included; or a share from 0 to 1 of the bytes that the blocks keep "
        "without recomputation"
    )
    modes: Mapping[str, Sequence[str]] | None = setting(
        None,
        "modes of single blocks, by their names in the module: keep (all activations), products (keep=products), "
        "recompute, host_input (recompute, with its input on the host) and offload (all activations to the host, "
        "nothing recomputed); the last two need activation_offloading. Blocks that aren't listed are recomputed. The "
        "preset auto writes such lists",
        check=_wrong_modes,
    )
    verify_recomputation: bool = setting(
        True,
        "compare each block's first recomputation in a fit with its forward, and raise ``ConflictError`` where they "
        "differ; torch compares shapes only",
    )

    @property
    def mode_of(self) -> dict[str, str]:
        """The mode of each listed block, by its name."""
        return {name: mode for mode, names in (self.modes or {}).items() for name in names}

    def _check_together(self) -> None:
        if self.modes is not None and (self.budget is not None or self.keep != NOTHING or self.every_k != 1):
            raise ConflictError(
                "activation_checkpointing: modes says for each block what it keeps, and budget, keep and every_k say it"
                " for all; write callback.activation_checkpointing.budget=null"
                " callback.activation_checkpointing.keep=nothing callback.activation_checkpointing.every_k=1, or"
                " callback.activation_checkpointing.modes=null"
            )
        if self.budget is not None and self.keep != NOTHING:
            raise ConflictError(
                f"activation_checkpointing: budget={self.budget} chooses whole blocks, and keep={self.keep!r} results"
                " inside each; write callback.activation_checkpointing.keep=nothing, or"
                " callback.activation_checkpointing.budget=null"
            )


def _nothing_offloads(settings: Settings, configuration: Configuration) -> str | None:
    moved = [name for name, mode in settings.mode_of.items() if mode in (HOST_INPUT, OFFLOAD)]
    if not moved or configuration.has("activation_offloading"):
        return None
    return (
        f"callback.activation_checkpointing.modes moves tensors of {moved[0]} to the host, and no technique does that;"
        " write +callback=activation_offloading, or list the block under recompute"
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan without the comparison of numbers, which only the first step makes; under a budget, plan three steps."""
    tracing = replace(tracing, attached=replace(settings, verify_recomputation=False))
    if settings.budget is None:
        return tracing
    # in bytes, small micro-batches keep more blocks than large ones
    scales = tracing.scales and isinstance(bytes_or_share(settings.budget), float)
    return replace(tracing, steps=max(tracing.steps, 3), scales=scales)


def _under_zero3(settings: Settings, configuration: Configuration) -> str:
    """Return whether each process recomputes the same blocks, for which the engine gathers their weights again."""
    if settings.budget is not None:
        return (
            "each process would choose its own blocks by the budget, and wait for the others' weights; write"
            " callback.activation_checkpointing.budget=null"
        )
    return EXACT


CARD = Card(
    name="activation_checkpointing",
    target="lightning_solo.techniques.activation_checkpointing.technique:ActivationCheckpointing",
    phase=Phase.SAVED_TENSORS,
    settings=Settings,
    saves="all activations inside the wrapped blocks except one block's: blocks x inside becomes blocks x input +"
    " inside",
    costs="one more forward of the wrapped blocks: at most a third more FLOPs (forward 1 + backward 2, again 1); with"
    " ``keep=products`` almost none, for a smaller saving; with ``budget`` as few as fit",
    numerics="bit-exact: random numbers, autocast, default dtype, numbers in attributes and BatchNorm statistics are"
    " those of the first forward; to 1e-5 for Hugging Face decoders with a key-value cache (T5), which is left out",
    conflicts="the model's own gradient checkpointing; blocks that keep tensors or can't be repeated (refused)",
    reference="Chen et al. 2016, https://arxiv.org/abs/1604.06174;"
    " https://docs.pytorch.org/docs/stable/checkpoint.html",
    exact=True,
    owns=frozenset({"saved_tensors"}),
    rules=(_nothing_offloads,),
    solved="modes",
    rung=Rung("checkpointing", order=20),
    planned="lightning_solo.techniques.activation_checkpointing.card:planned",
    engines=answers(ddp=EXACT, fsdp=EXACT, zero3=_under_zero3),
)
