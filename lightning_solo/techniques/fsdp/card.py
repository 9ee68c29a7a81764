"""The card of the strategy `fsdp`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import several_devices
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, names_or, setting
from lightning_solo.cards.tracing import STATES, Ranks, Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ShardedStrategy."""

    blocks: str | Sequence[str] = setting(
        "auto",
        "auto: repeated blocks by structure; or class names. Each is gathered as a whole",
        check=names_or("auto", "class names", "blocks=[Block]"),
    )
    reshard_after_forward: bool = setting(True, "free a block's gathered weights after forward, and gather them again")
    find_unused_parameters: bool = setting(
        False,
        "processes may use different parameters in a step, as experts that no token of one takes; those that none uses"
        " get a gradient of zeros",
    )
    checkpoint: str = setting(
        "file",
        "file: one file that any run reads, written by the first process; folder: each process writes its shards",
        allowed=("file", "folder"),
    )
    timeout_s: int = setting(1800, "seconds after which a process that waits for others fails", at_least=1)


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan one process's shards, and the blocks that it gathers and reduces."""
    ranks = Ranks(STATES, gathers=True, keeps_blocks=not settings.reshard_after_forward, blocks=settings.blocks)
    return replace(tracing, attached=None, ranks=ranks)


CARD = Card(
    name="fsdp",
    target="lightning_solo.techniques.fsdp.technique:ShardedStrategy",
    group="strategy",
    engine="fsdp",
    phase=Phase.STATES,
    settings=Settings,
    saves="on n devices 1 - 1/n of weights, gradients and optimizer states, but for two gathered blocks",
    costs="communication: each block's weights are gathered in forward and again in backward, its gradients reduced",
    numerics="a step on n devices equals a step of one device on the n batches together, within rounding",
    conflicts="what replaces a parameter in the fit, or needs whole weights; each technique's card says how it runs",
    reference="Zhao et al. 2023, https://arxiv.org/abs/2304.11277; FSDP2:"
    " https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    caveat=several_devices,
    planned="lightning_solo.techniques.fsdp.card:planned",
)
