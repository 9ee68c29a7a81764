"""Gradient accumulation with a factor that changes during a run; means over windows, and counts of steps, are exact."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_solo.cards.card import resources
from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.data.batch_size import size_of
from lightning_solo.data.loss_weights import weight_of
from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.optim.noise_scale import NoiseScale, squared_norm
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.window_gradients import gradients_of as window_gradients
from lightning_solo.optim.window_gradients import set_gradients, warn_of_dropped_window
from lightning_solo.seams import patches, resuming
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.accumulation_schedule.card import CARD, Settings
from lightning_solo.techniques.accumulation_schedule.milestones import (
    Epoch,
    count_optimizer_steps,
    epoch_of,
    factor_at,
)

OPTION = "callback.accumulation_schedule"
COUNTED = ("samples", "tokens")
"""Values of ``by`` that are counted in the batches."""


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the existing gradients of an optimizer's parameters."""
    return (p.grad for p in parameters_of(optimizer) if p.grad is not None)


class AccumulationSchedule(Technique, Settings):
    """Sets how many batches make an optimizer step: by epochs, optimizer steps, samples, tokens or gradient noise.

    A new factor takes effect with the next window, at any batch; it is logged as ``accumulation/factor``. The gradient
    of a short window (at the end of an epoch, or if ``training_step`` returned None) is the mean over its batches,
    before clipping. ``trainer.estimated_stepping_batches`` counts the same steps, so schedulers that use it end at the
    right step; by tokens or noise it is ``max_steps``, since the steps of an epoch aren't known in advance.

    With ``weight_by`` each batch is weighted by its share of the window's samples or tokens. Its loss is multiplied by
    its weight relative to the window's first batch. After the last batch, before clipping, the gradients are divided by
    the sum of these factors. No batch is read ahead, so a loader that saves its position saves the right one.

    By ``"noise_scale"`` the gradient of a window's first batch is compared with that of the whole window; the factor
    never falls.

    Raises:
        PresetError: the milestones are ill-formed, or begin with a factor of 1 under ``"noise_scale"``.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        """Begin a run."""
        self._factor: int | None = None  # the factor in effect; kept after a fit, for a checkpoint saved then
        self._start = 0  # index of the window's first batch; also kept
        self._begun = False  # whether a window has begun, in this fit or before the checkpoint
        self._seen = 0  # samples or tokens of all batches so far, if the schedule counts them
        self._noise = NoiseScale()
        self._warned = False
        self._resumed: dict[str, Any] | None = None  # the open window of a checkpoint
        self._begin_window()

    def _begin_window(self) -> None:
        self._reference = 0.0  # weight of this window's first batch that isn't empty, by which others are divided
        self._samples = 0  # with a gradient in this window, if noise is measured
        self._ahead = 0  # samples of the current batch, until its backward
        self._first: tuple[float, int] | None = None  # squared norm and samples of the window's first gradient

    @property
    def noise_scale(self) -> float | None:
        """The noise scale in samples; None until it has been measured often enough."""
        return self._noise.value

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse conflicts, and make the Trainer count steps by the schedule."""
        if stage != "fit" or self.ctx is not None:
            return
        refuse_conflicts(trainer, pl_module, self)
        super().setup(trainer, pl_module, stage)
        ctx = self._ctx
        self._init_state()
        ctx.window.varies = True
        ctx.undo.callback(setattr, trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches)
        ctx.undo.enter_context(patches.stepping_batches(trainer, self._count_steps))
        ctx.undo.enter_context(patches.windows(trainer, ctx.window.before))

    @property
    def _ctx(self) -> Run:
        assert self.ctx is not None  # joined in setup
        return self.ctx

    def _count_steps(self, trainer: Any, stock: int | float) -> int | float:
        """Return the value of ``estimated_stepping_batches``; Lightning's own for unknown or endless lengths."""
        batches = trainer.num_training_batches
        if trainer.max_epochs == -1 or batches == math.inf:
            return stock
        epoch: Epoch | None = Epoch(int(batches))
        if self.by in ("samples", "tokens", "noise_scale"):
            epoch = epoch_of(trainer.train_dataloader, int(batches)) if self.by == "samples" else None
        if epoch is not None:
            return count_optimizer_steps(self.milestones, self.by, epoch, max(trainer.max_epochs, 1), trainer.max_steps)
        if trainer.max_steps == -1:
            raise ConflictError(
                f"{OPTION}.by={self.by} and estimated_stepping_batches: the number of steps isn't known in advance;"
                " write Trainer(max_steps=...), or give the scheduler its number of steps"
            )
        return int(trainer.max_steps)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check for conflicts again; ``configure_model`` may have changed the optimization or released gradients."""
        refuse_conflicts(trainer, pl_module, self)
        if not self._ctx.window.gradients_stay and resources(CARD.reads, self):
            choice = "by=noise_scale" if self.weight_by == "batches" else f"weight_by={self.weight_by}"
            raise ConflictError(
                f"{OPTION}.{choice} needs the gradients at the end of a window, and they are released in backward;"
                f" write ~callback.gradient_release, or {OPTION}.weight_by=batches and another by"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with the schedule's factor, or with the checkpoint's factor and window."""
        self._begun = self._factor is not None
        self._warn_of_milestones(trainer)
        if self._factor is None:
            self._begin_with(trainer, self._wanted(trainer), self._start)
        else:
            self._ctx.window.start = self._start
            self._set_factor(trainer, self._factor)
        if self._resumed is not None:
            self._restore_window(trainer, self._resumed)
        self._resumed = None

    def _warn_of_milestones(self, trainer: Any) -> None:
        """Warn of milestones by epoch or optimizer step that the run ends before."""
        ends = {"epoch": trainer.max_epochs, "step": trainer.max_steps}
        if self.by == "step" and trainer.max_epochs != -1 and trainer.num_training_batches != math.inf:
            ends["step"] = self._count_steps(trainer, trainer.max_steps)
        end = ends.get(self.by, -1)
        if end not in (None, -1) and (late := [list(each) for each in self.milestones if each[0] >= end]):
            warnings.warn(
                f"{OPTION}.milestones={late}: the run ends before them, with {self.by} {end - 1}; write earlier"
                " milestones, or train longer",
                stacklevel=2,
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a window if the last one has ended, with the factor of this position; weigh the batch."""
        window = self._ctx.window
        if window.begins(batch_idx) or not self._begun:
            self._begun = True
            self._begin_with(trainer, self._wanted(trainer), batch_idx)
            self._begin_window()
        if not window.gradients_stay:
            # no gradient is left to rescale at the step; if the loader's length is unknown the weight stays 1
            window.weight = window.factor / min(window.factor, trainer.num_training_batches - self._start)
        if self.weight_by != "batches":
            weight = _count(batch, self.weight_by, "weight_by")
            self._reference = self._reference or weight
            window.weight = weight / self._reference if weight else 0.0
        if self.by in COUNTED:
            self._seen += int(_count(batch, self.by, "by"))
        if self.by == "noise_scale":
            self._ahead = int(_count(batch, "samples", "by"))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the gradient of a window's first batch, which has weight 1 and was divided by the factor."""
        if self.by != "noise_scale" or self._ctx.window.weight == 0:  # a batch without valid tokens has no gradient
            return
        self._samples, self._ahead = self._samples + self._ahead, 0
        if self._first is None:
            share = self._ctx.window.factor / _scale(trainer)
            norm = sum(squared_norm(gradients_of(optimizer)) for optimizer in trainer.optimizers)
            self._first = norm * share**2, self._samples

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Divide a window's gradients by the sum of its weights instead of the factor."""
        window = self._ctx.window
        if window.held and not math.isclose(window.held, window.factor):
            gradients = list(gradients_of(optimizer)) if window.gradients_stay else []
            for gradient in gradients:
                gradient.mul_(window.factor / window.held)
            if not gradients and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{OPTION}: a window of {window.held:g} batches was divided by {window.factor}. Its step is too"
                    " small, since gradients are taken in backward and none are left to correct",
                    stacklevel=2,
                )
        if self._first is not None and self._samples > self._first[1]:
            self._noise.add(*self._first, squared_norm(gradients_of(optimizer)), self._samples)
            if self._noise.value is not None:
                pl_module.log("accumulation/noise_scale", self._noise.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the current factor, the start of its window, the counts, and the open window if there is one.

        A window is open after a time limit or a signal, for example. Its state includes its gradients, unless they are
        released.
        """
        if self._factor is None:
            return {}
        state: dict[str, Any] = {"factor": self._factor, "start": self._start}
        if self.by in COUNTED:
            state[self.by] = self._seen
        if self.by == "noise_scale":
            state["noise_scale"] = self._noise.state()
        window = None if self.ctx is None else self.ctx.window
        if window is not None and window.gradients_saved and window.held and self._window_is_open:
            state["window"] = {
                "held": window.held,
                "reference": self._reference,
                "samples": self._samples,
                "first": self._first,
                "scale": _scale(self._ctx.trainer),
                "gradients": window_gradients(self._ctx.trainer.optimizers),
            }
        return state

    @property
    def _window_is_open(self) -> bool:
        """Whether the window's optimizer step is still to come."""
        return not self._ctx.window.is_last or resuming.batch_within(self._ctx.trainer) is not None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint; the window's gradients are restored at the start of training."""
        needed = {"factor", self.by} if self.by in COUNTED else {"factor"}
        unknown = sorted(set(state_dict) - {"factor", "start", *COUNTED, "noise_scale", "window"})
        missing = sorted(needed - set(state_dict))
        if unknown or missing:
            raise CheckpointError(
                f"{OPTION}.by={self.by} needs a state with {sorted(needed)}; the checkpoint's lacks {missing} and has"
                f" the unknown keys {unknown}; write the by of the saved run, or {OPTION}.by=epoch or step"
            )
        # older states count windows from 0
        for name, value, least in (("factor", state_dict["factor"], 1), ("start", state_dict.get("start", 0), 0)):
            if type(value) is not int or value < least:
                raise CheckpointError(f"{OPTION}: the checkpoint's state has {name}={value!r}, not an int >= {least}")
        self._factor, self._start = state_dict["factor"], state_dict.get("start", 0)
        self._seen = state_dict.get(self.by, 0) if self.by in COUNTED else 0
        if self.by == "noise_scale" and "noise_scale" in state_dict:
            self._noise.load(state_dict["noise_scale"])
        self._resumed = state_dict.get("window")

    def _restore_window(self, trainer: Any, state: dict[str, Any]) -> None:
        gradients, window, scale = state["gradients"], self._ctx.window, _scale(trainer)
        released = all(gradient is None for gradient in gradients)  # then the optimizer's states include them
        if not window.gradients_saved or released == window.gradients_stay or state.get("scale", scale) != scale:
            warn_of_dropped_window()
            return
        set_gradients(trainer.optimizers, gradients)
        window.held = state["held"]
        self._reference, self._samples = state["reference"], state["samples"]
        self._first = None if state["first"] is None else tuple(state["first"])

    def _wanted(self, trainer: Any) -> int:
        """Return the factor at the run's position."""
        if self.by == "noise_scale":
            return max(self._factor or 1, factor_at(self.milestones, self._noise.value or 0.0))
        positions = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        return factor_at(self.milestones, positions.get(self.by, self._seen))

    def _begin_with(self, trainer: Trainer, factor: int, batch_idx: int) -> None:
        before, self._factor = trainer.accumulate_grad_batches, factor
        self._start = self._ctx.window.start = batch_idx
        if factor == before:
            return
        self._set_factor(trainer, factor)
        rank_zero_info(
            f"accumulation_schedule: {before} -> {factor} batches per optimizer step, from epoch"
            f" {trainer.current_epoch}, batch {batch_idx}, optimizer step {trainer.global_step}"
        )

    def _set_factor(self, trainer: Trainer, factor: int) -> None:
        trainer.accumulate_grad_batches = factor
        patches.log_metrics(trainer, {"accumulation/factor": factor})


def _scale(trainer: Any) -> float:
    """Return the factor by which gradients are scaled until the step: 1 except for precision 16-mixed."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _count(batch: Any, by: str, option: Literal["by", "weight_by"]) -> float:
    samples, _ = size_of(batch)
    if samples is None and by == "samples":
        raise ConflictError(
            f"{OPTION}.{option} counts samples by a batch's first tensor, and this {type(batch).__name__} has none;"
            f" write {OPTION}.by=epoch or step, and {OPTION}.weight_by=batches"
        )
    return weight_of(batch, samples or 0, by, f"{OPTION}.{option}")


def refuse_conflicts(trainer: Any, pl_module: Any, schedule: AccumulationSchedule) -> None:
    """Check that nothing else decides when the optimizer steps."""
    if not pl_module.automatic_optimization:
        raise ConflictError(
            f"{OPTION} and {type(pl_module).__name__}.automatic_optimization=False: the module decides when to step;"
            f" write ~{OPTION}, and accumulate in training_step"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConflictError(
            f"{OPTION} and accumulate_grad_batches={trainer.accumulate_grad_batches}: both set the factor; write"
            f" {OPTION}.milestones=[[0,{trainer.accumulate_grad_batches}]], and drop accumulate_grad_batches"
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise ConflictError(
            f"{OPTION} and {type(trainer.strategy).__name__}, which accumulates by itself, with one factor for the run;"
            f" write ~{OPTION} accumulate_grad_batches=<N>, or take another strategy"
        )
    refuse_callbacks(OPTION, resources(CARD.owns, schedule), trainer.callbacks)
    for other in trainer.callbacks:
        if isinstance(other, AccumulationSchedule) and other is not schedule:
            raise ConflictError(
                f"two AccumulationSchedule callbacks: both set the factor; write one {OPTION}.milestones"
            )
