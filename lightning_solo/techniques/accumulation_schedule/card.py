"""The card of `accumulation_schedule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_solo.cards.arguments import setting
from lightning_solo.cards.card import Card, Rung
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.tracing import Tracing


def _not_rising_pairs(milestones: Sequence[Sequence[int]]) -> str | None:
    firsts = [pair[0] for pair in milestones if len(pair) == 2]
    pairs = len(firsts) == len(milestones) > 0
    if pairs and min(firsts) >= 0 and firsts == sorted(set(firsts)) and min(factor for _, factor in milestones) >= 1:
        return None
    return "allowed are pairs [first, factor] such as [[0, 2], [10, 4]]: first >= 0 and rising, factor >= 1, integers"


@dataclass(frozen=True)
class Settings:
    """Arguments of AccumulationSchedule."""

    milestones: Sequence[Sequence[int]] = setting(
        ((0, 4),), "pairs [first, factor]: from ``first`` on, ``factor`` batches make a step", check=_not_rising_pairs
    )
    by: Literal["epoch", "step"] = setting("epoch", "what ``first`` counts: epochs or optimizer steps")


def first_factor(settings: Settings) -> int:
    """Return how many batches make the first optimizer step."""
    first, factor = settings.milestones[0]
    return factor if first == 0 else 1


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the longest window, without the schedule itself."""
    factor = max(int(factor) for _, factor in settings.milestones)
    return replace(tracing, accumulation=max(tracing.accumulation, factor), node=None)


CARD = Card(
    name="accumulation_schedule",
    target="lightning_solo.techniques.accumulation_schedule.technique:AccumulationSchedule",
    phase=Phase.STEP,
    settings=Settings,
    saves="activations: global batch = factor x micro-batch, at the activations of one micro-batch",
    costs="none beyond the smaller kernels of a micro-batch; a step comes once in ``factor`` batches",
    numerics="gradients equal a hand-written loop's mean over the window; a short window counts by what it holds",
    conflicts="manual optimization, Trainer(accumulate_grad_batches != 1), strategies that accumulate by themselves,"
    " ZenFlow among them; GradientAccumulationScheduler and StochasticWeightAveraging (both set the same factor)",
    reference="https://lightning.ai/docs/pytorch/stable/common/trainer.html#accumulate-grad-batches; Smith et al.,"
    ' "Don\'t Decay the Learning Rate, Increase the Batch Size", https://arxiv.org/abs/1711.00489',
    owns=frozenset({"accumulation_factor"}),
    instead={
        "accumulation_factor": "write the factor as a milestone,"
        " callback.accumulation_schedule.milestones=[[0, {factor}]], and drop accumulate_grad_batches"
    },
    first_factor=first_factor,
    rung=Rung("accumulation", order=30),
    planned="lightning_solo.techniques.accumulation_schedule.card:planned",
)
