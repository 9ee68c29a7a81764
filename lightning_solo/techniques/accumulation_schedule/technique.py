"""Gradient accumulation whose factor changes along the run, with right last windows and right step counts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_solo.cards.card import resources
from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.accumulation_schedule.card import CARD

Milestones = Sequence[Sequence[int]]


def factor_at(milestones: Milestones, position: int) -> int:
    """Return the factor of the last milestone that ``position`` has reached, and 1 before the first.

    >>> [factor_at([[2, 4], [5, 8]], position) for position in (0, 2, 4, 5, 9)]
    [1, 4, 4, 8, 8]
    """
    factor = 1
    for first, then in milestones:
        if position >= first:
            factor = then
    return factor


def next_factor(current: int, wanted: int, batch_idx: int) -> int:
    """Return the factor from ``batch_idx`` on: ``wanted`` where it can take effect, else ``current``.

    Lightning zeroes gradients where ``batch_idx % N == 0`` and steps where ``(batch_idx + 1) % N == 0``. So a window is
    open unless the current factor divides ``batch_idx``, and gradients survive its start unless the new one does too.

    >>> next_factor(2, 3, batch_idx=4), next_factor(2, 3, batch_idx=6), next_factor(4, 2, batch_idx=2)
    (2, 3, 4)
    """
    return wanted if batch_idx % current == 0 and batch_idx % wanted == 0 else current


def count_optimizer_steps(
    milestones: Milestones, by: Literal["epoch", "step"], batches: int, epochs: int, max_steps: int = -1
) -> int:
    """Return how many optimizer steps ``epochs`` epochs of ``batches`` batches take, at most ``max_steps`` unless -1.

    Walks from milestone to milestone, not from window to window: a long run costs no more than a short one.

    >>> count_optimizer_steps([[0, 4]], "epoch", batches=10, epochs=2)  # 4 + 4 + 2, twice
    6
    """
    firsts = sorted(first for first, _ in milestones)
    current, steps, epoch = 1, 0, 0
    while batches > 0 and epoch < epochs and (max_steps == -1 or steps < max_steps):
        position = epoch if by == "epoch" else steps
        current = factor_at(milestones, position)  # every factor divides batch 0
        ahead = min((first - position for first in firsts if first > position), default=math.inf)
        per_epoch = math.ceil(batches / current)
        whole = epochs - epoch
        if ahead != math.inf:
            whole = min(whole, int(ahead) if by == "epoch" else int(ahead) // per_epoch)
        if whole:
            steps, epoch = steps + whole * per_epoch, epoch + whole
        else:
            steps, epoch = _steps_after_epoch(milestones, batches, current, steps), epoch + 1
    return steps if max_steps == -1 else min(steps, max_steps)


def _steps_after_epoch(milestones: Milestones, batches: int, current: int, steps: int) -> int:
    """Return the optimizer steps taken by the end of an epoch in which a milestone by step is reached."""
    batch_idx = 0
    while batch_idx < batches:
        current = next_factor(current, factor_at(milestones, steps), batch_idx)
        batch_idx, steps = batch_idx + current, steps + 1
    return steps


def rescale_short_window(optimizer: torch.optim.Optimizer, factor: int, held: int) -> bool:
    """Make gradients that were divided by ``factor`` the mean over the ``held`` batches of the window, in place.

    Returns:
        Whether there was any gradient to rescale; strategies that step during backward have none left by now.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for gradient in gradients:
        gradient.mul_(factor / held)
    return bool(gradients)


def short_window_weight(factor: int, batches_ahead: float) -> float:
    """Return by what the losses of a window count that holds fewer batches than the factor; 1 for a full one.

    >>> short_window_weight(4, batches_ahead=10), short_window_weight(4, batches_ahead=2)
    (1.0, 2.0)
    """
    return factor / min(factor, batches_ahead)


class AccumulationSchedule(Technique):
    """Sets how many batches make one optimizer step, by epoch or by optimizer step.

    A change takes effect at the first batch index that the new factor divides while no window is open, always at the
    start of an epoch; it is logged as ``accumulation/factor``. The step of a short window (an epoch's last batches, or
    batches for which ``training_step`` returned None) is the mean over the batches that it holds, before clipping.
    ``trainer.estimated_stepping_batches`` counts the same steps, so schedulers made from it end where they should.

    Args:
        milestones: pairs ``[first, factor]``, rising in ``first``: from epoch or optimizer step ``first`` on,
            ``factor`` batches make one step. Before the first milestone the factor is 1.
        by: what ``first`` counts, ``"epoch"`` or ``"step"`` (optimizer steps, Lightning's ``global_step``).

    Raises:
        PresetError: the milestones are ill-formed.
    """

    phase = CARD.phase

    def __init__(self, milestones: Sequence[Sequence[int]] = ((0, 4),), by: Literal["epoch", "step"] = "epoch") -> None:
        super().__init__()
        CARD.check_call(locals())
        self.milestones = tuple((first, factor) for first, factor in milestones)
        self.by: Literal["epoch", "step"] = by
        self._factor: int | None = None  # the factor in effect; survives the fit, for a checkpoint saved after it
        self._warned = False

    def __repr__(self) -> str:
        return CARD.repr(self)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be combined, and make the Trainer count steps by the schedule."""
        if stage != "fit" or self.ctx is not None:
            return
        refuse_conflicts(trainer, pl_module, self)
        super().setup(trainer, pl_module, stage)
        ctx = self._ctx
        self._factor, self._warned = None, False
        ctx.window.varies = True
        ctx.undo.callback(setattr, trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches)
        ctx.undo.enter_context(patches.stepping_batches(trainer, self._count_steps))

    @property
    def _ctx(self) -> Run:
        assert self.ctx is not None  # joined in setup
        return self.ctx

    def _count_steps(self, trainer: Any, stock: int | float) -> int | float:
        """Return what ``estimated_stepping_batches`` is to be; of unknown or endless lengths Lightning's own answer."""
        if trainer.max_epochs == -1 or trainer.num_training_batches == math.inf:
            return stock
        return count_optimizer_steps(
            self.milestones, self.by, int(trainer.num_training_batches), max(trainer.max_epochs, 1), trainer.max_steps
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look again: ``automatic_optimization`` may be set as late as in ``configure_model``."""
        refuse_conflicts(trainer, pl_module, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with the factor in effect when the checkpoint was saved, else with the schedule's."""
        factor = factor_at(self.milestones, self._position(trainer)) if self._factor is None else self._factor
        self._change(trainer, factor, batch_idx=0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Change the factor where a window opens and the new factor divides the batch index."""
        current = trainer.accumulate_grad_batches
        factor = next_factor(current, factor_at(self.milestones, self._position(trainer)), batch_idx)
        if factor != current:
            self._change(trainer, factor, batch_idx)
        window = self._ctx.window
        if batch_idx % factor == 0 and not window.gradients_stay:
            # there is nothing to rescale at the step; where the loader's length is unknown the weight stays 1
            window.weight = short_window_weight(factor, trainer.num_training_batches - batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let a short window count by what it holds; Lightning divided each loss by the full factor."""
        window = self._ctx.window
        factor = round(window.factor / window.weight)
        if not 0 < window.held < factor:
            return
        if not rescale_short_window(optimizer, factor, window.held) and not self._warned:
            self._warned = True
            warnings.warn(
                f"AccumulationSchedule: a window of {window.held} batches was divided by {factor}; no gradients are "
                "left to correct at this moment (the optimizer stepped during backward), so its step is too small",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the factor in effect: a change that still waits for its batch cannot be told from epoch and step."""
        return {} if self._factor is None else {"factor": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the factor in effect when the checkpoint was saved.

        Raises:
            CheckpointError: a key is missing or unknown, or the factor is not a positive integer.
        """
        unknown, missing = sorted(set(state_dict) - {"factor"}), sorted({"factor"} - set(state_dict))
        if unknown or missing:
            raise CheckpointError(
                f"the checkpoint's state of AccumulationSchedule has unknown keys {unknown} and lacks {missing}; "
                "it holds exactly ['factor']"
            )
        factor = state_dict["factor"]
        if type(factor) is not int or factor < 1:
            raise CheckpointError(
                f"the checkpoint's state of AccumulationSchedule has factor={factor!r}, not an int >= 1"
            )
        self._factor = factor

    def _position(self, trainer: Trainer) -> int:
        return trainer.current_epoch if self.by == "epoch" else trainer.global_step

    def _change(self, trainer: Trainer, factor: int, batch_idx: int) -> None:
        self._factor, before = factor, trainer.accumulate_grad_batches
        if factor == before:
            return
        trainer.accumulate_grad_batches = factor
        rank_zero_info(
            f"AccumulationSchedule: {before} -> {factor} batches per optimizer step, from epoch {trainer.current_epoch}"
            f", batch {batch_idx}, optimizer step {trainer.global_step} on"
        )
        for logger in trainer.loggers:
            # the axis that self.log() uses
            logger.log_metrics({"accumulation/factor": factor}, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def refuse_conflicts(trainer: Any, pl_module: Any, schedule: AccumulationSchedule) -> None:
    """Check that nothing else decides when the optimizer steps.

    Raises:
        ConflictError: something else does; the message names it and what to write instead.
    """
    if not pl_module.automatic_optimization:
        raise ConflictError(
            f"AccumulationSchedule and {type(pl_module).__name__}.automatic_optimization=False: under manual "
            "optimization the module decides when to step. Remove the callback and accumulate in training_step"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConflictError(
            f"AccumulationSchedule and accumulate_grad_batches={trainer.accumulate_grad_batches}: both set the factor. "
            f"Write milestones=[[0, {trainer.accumulate_grad_batches}]] and leave accumulate_grad_batches at 1"
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise ConflictError(
            f"AccumulationSchedule and {type(trainer.strategy).__name__}: this strategy accumulates by itself, with "
            "one factor for the run. Write accumulate_grad_batches=N and remove the callback, or take another strategy"
        )
    refuse_callbacks("AccumulationSchedule", resources(CARD.owns, schedule), trainer.callbacks)
    for other in trainer.callbacks:
        if isinstance(other, AccumulationSchedule) and other is not schedule:
            raise ConflictError("two AccumulationSchedule callbacks: both set the factor. Put all milestones into one")
