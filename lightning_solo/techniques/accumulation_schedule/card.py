"""The card of `accumulation_schedule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_solo.cards.card import Card, Rung
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import PresetError


def _not_rising_pairs(milestones: Sequence[Sequence[int]]) -> str | None:
    firsts = [pair[0] for pair in milestones if len(pair) == 2]
    pairs = len(firsts) == len(milestones) > 0
    if pairs and min(firsts) >= 0 and firsts == sorted(set(firsts)) and min(factor for _, factor in milestones) >= 1:
        return None
    return "allowed are pairs [first, factor] such as [[0, 2], [10, 4]]: first >= 0 and rising, factor >= 1, integers"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of AccumulationSchedule."""

    milestones: Sequence[Sequence[int]] = setting(
        ((0, 4),),
        "pairs ``[first, factor]``, rising in ``first``: from there on ``factor`` batches make one step; before the "
        "first pair the factor is 1",
        check=_not_rising_pairs,
    )
    by: Literal["epoch", "step", "samples", "tokens", "noise_scale"] = setting(
        "epoch",
        "what ``first`` counts: epochs, optimizer steps (Lightning's ``global_step``), samples or tokens (labels "
        "other than -100) of all batches so far, or the gradient's noise scale: the number of samples at which its "
        "noise equals its signal",
    )
    weight_by: str = setting(
        "batches",
        "the weight of each batch in its step: batches (equal weights), samples, tokens (labels other than -100),"
        " shifted_tokens (those without each row's first), or the sum of a key of the batch",
    )

    def _check_together(self) -> None:
        if self.by == "noise_scale" and first_factor(self) < 2:
            raise PresetError(
                f"accumulation_schedule.milestones={[list(pair) for pair in self.milestones]} by=noise_scale: the noise"
                " of a window of one batch can't be measured; write a first milestone of 2 batches or more, such as"
                " callback.accumulation_schedule.milestones=[[0,2]]"
            )


def first_factor(settings: Settings) -> int:
    """Return the number of batches in the first optimizer step."""
    first, factor = settings.milestones[0]
    return factor if first == 0 else 1


def _owned(settings: Any) -> frozenset[str]:
    measured = settings.weight_by != "batches" or settings.by == "noise_scale"
    return frozenset({"accumulation_factor", "micro_batch_weights"} if measured else {"accumulation_factor"})


def _read(settings: Any) -> frozenset[str]:
    return frozenset({"gradients"}) if "micro_batch_weights" in _owned(settings) else frozenset()


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the longest window of the schedule."""
    factor = max(int(factor) for _, factor in settings.milestones)
    return replace(tracing, accumulation=max(tracing.accumulation, factor), attached=None)


def _under_engines(settings: Settings, configuration: Configuration) -> str:
    """Return what several processes make of the schedule, which each of them follows by itself."""
    if settings.by not in ("epoch", "step"):
        return (
            f"each process counts the {settings.by} of its own batches, and changes its factor at another batch; write"
            " callback.accumulation_schedule.by=step"
        )
    if settings.weight_by != "batches":
        return (
            f"each process weighs its own batches by {settings.weight_by}, without the others'; write"
            " callback.accumulation_schedule.weight_by=batches"
        )
    return ROUNDING


CARD = Card(
    name="accumulation_schedule",
    target="lightning_solo.techniques.accumulation_schedule.technique:AccumulationSchedule",
    phase=Phase.STEP,
    settings=Settings,
    saves="activations: global batch = factor x micro-batch, at the activations of one micro-batch",
    costs="only the smaller kernels of a micro-batch; one step per ``factor`` batches. Counting tokens or a key"
    " synchronises with the device once per batch, the noise scale twice per step. A checkpoint within a window"
    " contains its gradients",
    numerics="gradients equal a hand-written loop's mean over the window; a short window is divided by its own batches."
    " With ``weight_by`` they equal those of one batch with all samples or tokens of the window",
    conflicts="manual optimization, Trainer(accumulate_grad_batches != 1), strategies that accumulate themselves;"
    " GradientAccumulationScheduler and StochasticWeightAveraging (both set the same factor);"
    " ``weight_by`` and the noise scale: gradients that are released in backward",
    reference="https://lightning.ai/docs/pytorch/stable/common/trainer.html#accumulate-grad-batches; Smith et al.,"
    ' "Don\'t Decay the Learning Rate, Increase the Batch Size", https://arxiv.org/abs/1711.00489',
    owns=_owned,
    reads=_read,
    instead={
        "accumulation_factor": "callback.accumulation_schedule.milestones=[[0,{factor}]], a milestone with the factor,"
        " and drop accumulate_grad_batches",
        "micro_batch_weights": "callback.accumulation_schedule.weight_by=batches"
        " callback.micro_batching.weight_by=shifted_tokens (not with by=noise_scale), so that micro_batching weighs all"
        " tokens of a step",
    },
    first_factor=first_factor,
    rung=Rung("accumulation", order=30),
    planned="lightning_solo.techniques.accumulation_schedule.card:planned",
    engines=alike(_under_engines),
)
