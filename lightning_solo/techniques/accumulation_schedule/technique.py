"""Gradient accumulation whose factor changes along the run, with right last windows and right step counts.

Saves:      activations: global batch = factor x micro-batch, at the activations of one micro-batch
Costs:      none beyond the smaller kernels of a micro-batch; a step comes once in ``factor`` batches
Numerics:   gradients equal a hand-written loop's mean over the window; a short window counts by what it holds
Conflicts:  manual optimization, Trainer(accumulate_grad_batches != 1), strategies that accumulate by themselves,
            ZenFlow among them; GradientAccumulationScheduler and StochasticWeightAveraging (both set the same factor)
Reference:  https://lightning.ai/docs/pytorch/stable/common/trainer.html#accumulate-grad-batches; Smith et al.,
            "Don't Decay the Learning Rate, Increase the Batch Size", https://arxiv.org/abs/1711.00489
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_solo.cards.phase import Phase
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique

Milestones = Sequence[Sequence[int]]

# Other callbacks that set the same attribute of the Trainer, by class name: they exist in both homes of Lightning.
RIVALS = {
    "GradientAccumulationScheduler": "write its schedule as milestones here",
    "StochasticWeightAveraging": "average with lightning's WeightAveraging callback, which leaves the factor alone",
}


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

    phase = Phase.STEP

    def __init__(self, milestones: Sequence[Sequence[int]] = ((0, 4),), by: Literal["epoch", "step"] = "epoch") -> None:
        super().__init__()
        self.milestones = _checked(milestones)
        if by not in ("epoch", "step"):
            raise PresetError(f"accumulation_schedule.by={by!r}: allowed are 'epoch' and 'step'")
        self.by: Literal["epoch", "step"] = by
        self._factor: int | None = None  # the factor in effect; survives the fit, for a checkpoint saved after it
        self._warned = False

    def __repr__(self) -> str:
        """The call that builds this callback again."""
        return f"{type(self).__name__}(milestones={self.milestones!r}, by={self.by!r})"

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
        if not _is_int(factor) or factor < 1:
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
    for other in trainer.callbacks:
        names = {parent.__name__ for parent in type(other).__mro__} & set(RIVALS)
        for name in names:
            raise ConflictError(f"AccumulationSchedule and {name}: both set the factor. Remove {name}; {RIVALS[name]}")
        if isinstance(other, AccumulationSchedule) and other is not schedule:
            raise ConflictError("two AccumulationSchedule callbacks: both set the factor. Put all milestones into one")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(milestones: object) -> tuple[tuple[int, int], ...]:
    """Return the milestones as pairs of our own.

    Raises:
        PresetError: not pairs of integers, not rising, a position below 0 or a factor below 1.
    """
    allowed = (
        "allowed are pairs [first, factor] such as [[0, 2], [10, 4]]: first >= 0 and rising, factor >= 1, integers"
    )
    if not isinstance(milestones, Sequence) or isinstance(milestones, str | bytes) or not milestones:
        raise PresetError(f"accumulation_schedule.milestones={milestones!r}: {allowed}")
    pairs: list[tuple[int, int]] = []
    for index, pair in enumerate(milestones):
        option = f"accumulation_schedule.milestones[{index}]={pair!r}"
        if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) != 2:
            raise PresetError(f"{option}: {allowed}")
        first, factor = pair
        if not _is_int(first) or not _is_int(factor) or first < 0 or factor < 1:
            raise PresetError(f"{option}: {allowed}")
        if pairs and first <= pairs[-1][0]:
            raise PresetError(f"{option}: first must be above {pairs[-1][0]}, the one before; {allowed}")
        pairs.append((first, factor))
    return tuple(pairs)
