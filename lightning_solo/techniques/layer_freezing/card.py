"""The card of `layer_freezing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import PresetError


def _wrong_milestones(milestones: Sequence[Sequence[int]]) -> str | None:
    rows = [list(row) for row in milestones]
    if any(len(row) != 2 or any(type(value) is not int or value < 0 for value in row) for row in rows):
        return "write pairs of whole numbers, [first epoch or step, trained blocks], as [[0, 0], [2, 4]]"
    if rows and rows[0][0] != 0:
        return "the first milestone begins at 0"
    if any(after[0] <= before[0] or after[1] < before[1] for before, after in pairwise(rows)):
        return "milestones come in order, and train no fewer blocks than before"
    return None


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of LayerFreezing."""

    trained_blocks: int | None = setting(
        None, "train the last so many blocks and all after them; null: all that isn't in frozen", at_least=0
    )
    frozen: Sequence[str] = setting((), "patterns of names of parts or parameters that are frozen, as [embed, head]")
    milestones: Sequence[Sequence[int]] = setting(
        (), "pairs [first, trained_blocks]: from which epoch or step on so many blocks train", check=_wrong_milestones
    )
    unit: str = setting("epochs", "of the milestones", allowed=("epochs", "steps"))
    rate_decay: float = setting(
        1.0,
        "learning rate of each block divided by that of the part above it; below 1 lower blocks learn more slowly",
        check=lambda rate: None if 0 < rate <= 1 else "expected a number above 0, and at most 1",
    )
    blocks: str | Sequence[str] = blocks_setting()

    def _check_together(self) -> None:
        if self.milestones and self.trained_blocks is not None:
            raise PresetError(
                f"{self.technique}.trained_blocks={self.trained_blocks} and milestones, which say so too; write"
                f" milestones=[[0, {self.trained_blocks}]] with what follows, or drop milestones"
            )

    def blocks_at(self, epoch: int, step: int) -> int | None:
        """Return how many blocks train in an epoch, from a step on; None for all.

        >>> [Settings(milestones=[[0, 0], [2, 4]]).blocks_at(epoch, step=0) for epoch in (0, 1, 2, 9)]
        [0, 0, 4, 4]
        """
        now = epoch if self.unit == "epochs" else step
        reached = [blocks for first, blocks in self.milestones if first <= now]
        return reached[-1] if reached else self.trained_blocks

    @property
    def most_blocks(self) -> int | None:
        """The number of blocks that train at the end; None for all."""
        return self.milestones[-1][1] if self.milestones else self.trained_blocks


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the end of the run, when most is trained."""
    if not settings.milestones:
        return tracing
    assumption = "layer_freezing is planned as after its last milestone, when most blocks train"
    attached = replace(settings, milestones=(), trained_blocks=settings.most_blocks)
    return tracing.assuming(assumption, attached=attached)


def _engine(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.has("zero_offload"):
        return (
            "callback.layer_freezing and strategy=zero_offload: the engine keeps states of all weights that it was"
            " given; write ~strategy, or ~callback.layer_freezing and freeze weights in the module by"
            " requires_grad_(False)"
        )
    return None


def _under_ddp(settings: Settings, configuration: Configuration) -> str:
    """Return whether the same parameters are trained all the time, which are reduced from the start."""
    if settings.milestones:
        return (
            "DistributedDataParallel reduces only the parameters that are trained at the start, and those of a later"
            " milestone would differ; write callback.layer_freezing.milestones=[]"
            " callback.layer_freezing.trained_blocks=1"
        )
    return ROUNDING


CARD = Card(
    name="layer_freezing",
    target="lightning_solo.techniques.layer_freezing.technique:LayerFreezing",
    phase=Phase.ADAPT,
    settings=Settings,
    saves="of each frozen parameter gradient and optimizer states, with AdamW in fp32 12 of 16 bytes; all activations"
    " below the lowest trained block, and its backward",
    costs="none",
    numerics="not what training all parameters gives: for fine-tuning. Frozen normalisations keep their"
    " running statistics",
    conflicts="another technique that chooses which parameters are trained",
    reference="Howard and Ruder 2018, ULMFiT, https://arxiv.org/abs/1801.06146; Lee et al. 2019,"
    " https://arxiv.org/abs/1911.03090",
    owns=frozenset({"trained_parameters"}),
    rules=(_engine,),
    on_cpu={"milestones": [[0, 0], [2, 1]], "unit": "steps", "rate_decay": 0.5},
    planned="lightning_solo.techniques.layer_freezing.card:planned",
    engines=answers(
        ddp=_under_ddp,
        fsdp="it wasn't compared on sharded weights",
        zero3="the engine keeps states of all weights that it was made for",
    ),
)
