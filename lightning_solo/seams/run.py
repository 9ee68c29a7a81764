"""One run of a Trainer, as its techniques see it: which act, in which order, in which window, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_solo.cards.catalogue import chosen_of
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import ConflictError
from lightning_solo.seams import patches
from lightning_solo.seams.homes import home_of, part

if TYPE_CHECKING:
    from lightning_solo.seams.technique import Checkpoint, Technique


class Window:
    """The micro-batches between two optimizer steps.

    Attributes:
        held: micro-batches of this window that have given a gradient so far, each by its weight; one counts once,
            however often its backward runs.
        weight: the factor by which the loss of a micro-batch is multiplied before backward; at 0 there is no backward,
            since a loss that is a mean over nothing has NaN as its gradient, whatever it is multiplied by.
        varies: whether the factor may change along the run.
        start: index of the window's first batch, where the factor varies.
        gradients_stay: whether parameters hold their gradients when the optimizer's step comes. Where they don't, a
            short window can only be set right by its losses' weight.
        gradients_saved: whether a checkpoint that is saved while a window is open has its gradients, wherever they are.
        repeats: whether a micro-batch whose forward or backward has failed can be run again: gradients are only kept
            until the step, and zeroing them is all that it takes.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counted = False
        self._latest: tuple[int, int] | None = None  # epoch and index of the batch that ran last
        self.held = 0.0
        self.weight = 1.0
        self.varies = False
        self.start = 0
        self.gradients_stay = self.gradients_saved = True
        self.repeats = True

    @property
    def factor(self) -> int:
        """Micro-batches per optimizer step, by which Lightning divides each loss."""
        return int(self._trainer.accumulate_grad_batches)

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer step may come after several micro-batches."""
        return self.factor > 1 or self.varies

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after this micro-batch: the factor is reached, or the epoch ends."""
        return patches.steps_next(self._trainer)

    def before(self, batch_idx: int) -> int:
        """Return how many batches come before this one in its window."""
        start = self.start if self.start <= batch_idx else 0  # else it is one of the epoch before
        return (batch_idx - start) % self.factor

    def begins(self, batch_idx: int) -> bool:
        """Return whether the batch that runs next is a window's first; a loader may have given None for others."""
        before = self.before(batch_idx)
        first = self._trainer.current_epoch, batch_idx - before
        return before == 0 or (self._latest is not None and self._latest < first)

    def start_batch(self, batch_idx: int) -> None:
        """Begin a micro-batch, and with its first one a window."""
        self._counted = False
        if self.begins(batch_idx):
            self.held = 0.0
        self._latest = self._trainer.current_epoch, batch_idx

    def count(self) -> None:
        """Count the present micro-batch, once."""
        self.held += 0 if self._counted else self.weight
        self._counted = True


class Run:
    """The context of one fit, validation, test or prediction, which every seam of a technique is given.

    Attributes:
        strategy: of the Trainer, with seams.
        trainer: of either home.
        home: the package of the Trainer, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        window: the present window of accumulation.
        is_set_up: whether module and optimizers are ready.
        undo: what restores the module and Lightning's objects; it runs once, after the run or its failure.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self.strategy = strategy
        self.trainer = trainer
        self.home = home_of(trainer)
        self.window = Window(trainer)
        self.undo = ExitStack()
        self.is_set_up = False
        self.ended = False
        self.techniques: list[Technique] = []
        self._transformed = False
        self._with: dict[str, list[Technique]] = {}

    @property
    def module(self) -> Any:
        """The LightningModule."""
        return self.strategy.lightning_module

    @property
    def device(self) -> torch.device:
        """The device on which the module runs."""
        device: torch.device = self.strategy.root_device
        return device

    @property
    def precision(self) -> str:
        """Lightning's name of the precision, such as ``"bf16-mixed"``."""
        return str(self.strategy.precision_plugin.precision)

    @property
    def training(self) -> bool:
        """Whether this is a fit."""
        return bool(self.trainer.state.fn == "fit")

    @cached_property
    def info(self) -> Callable[[str], None]:
        """Log a line once, whatever the number of processes."""
        log: Callable[[str], None] = part(self.home, "utilities").rank_zero_info
        return log

    def join(self, technique: Technique) -> None:
        """Have a technique act in this run, at the place that its phase gives it.

        Raises:
            ConflictError: it replaces optimizers or steps, and another one does so too, or an engine; or by their cards
                it can't be combined with another one.
        """
        if technique in self.techniques:
            return
        if technique.overrides("optimizers") or technique.overrides("step"):
            self._require_sole(technique)
        self._refuse_rivals(technique)
        technique.ctx = self
        self.techniques.append(technique)
        self.techniques.sort(key=lambda each: each.phase)  # stable: within a phase as they are listed
        self._with.clear()

    def _refuse_rivals(self, technique: Technique) -> None:
        """Refuse what cards don't combine, however it came here: a preset's lists were checked before."""
        others = [*self.techniques, self.strategy]
        others = [other for other in others if type(other) is not type(technique)]  # which says so itself, if it minds
        chosen = [each for each in map(chosen_of, [*others, technique]) if each is not None]
        for message in Configuration(techniques=tuple(chosen)).rivalries():
            raise ConflictError(message)
        overfit, newest = self.trainer.overfit_batches, chosen_of(technique)
        if overfit and newest is not None and "batches" in newest.owned():
            raise ConflictError(
                f"{newest.choice} and overfit_batches={overfit}: it makes other batches in each epoch, which wouldn't"
                " be overfitted; write overfit_batches=0 with a torch.utils.data.Subset of few items, or"
                f" {newest.removal} (removes {newest.card.name})"
            )

    def _require_sole(self, technique: Technique) -> None:
        name = type(technique).__name__
        if any(type(other) is type(technique) for other in self.techniques):
            raise ConflictError(f"two {name} in one run: drop one")
        kinds = {cls.__name__ for cls in type(self.strategy).__mro__}
        if "ParallelStrategy" in kinds:
            raise ConflictError(
                f"{name} and {type(self.strategy).__name__}, which keeps optimizers or gradients in its own way: write"
                f" Trainer(strategy='auto', devices=1), or drop {name}"
            )

    def having(self, seam: str) -> list[Technique]:
        """Return the techniques that act at a seam, by phase."""
        if seam not in self._with:
            self._with[seam] = [technique for technique in self.techniques if technique.overrides(seam)]
        return self._with[seam]

    def around(self, seam: str, proceed: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``proceed`` with the techniques' seams around it, that of the first phase outermost."""
        for technique in reversed(self.having(seam)):
            proceed = partial(getattr(technique, seam), self, proceed)
        return proceed

    def checkpoints(self) -> list[Checkpoint]:
        """Return how the techniques change checkpoints, by phase."""
        return [technique.checkpoint(self) for technique in self.having("checkpoint")]

    def loss(self, proceed: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``proceed`` with the techniques' ``loss`` around it; an outer one may run the inner ones on parts."""
        for technique in reversed(self.having("loss")):
            proceed = partial(self._loss_of_part, technique, proceed)
        return proceed

    def _loss_of_part(self, technique: Technique, proceed: Callable[..., Any], **outer: Any) -> Any:
        def within(weight: float = 1.0, **inner: Any) -> Any:
            return proceed(**{**outer, **inner, "weight": weight * outer.get("weight", 1.0)})

        return technique.loss(self, within)

    def transform(self) -> None:
        """Let techniques change the module, once: after ``configure_model``, before it goes to the device."""
        if not self._transformed:
            self._transformed = True
            for technique in self.having("transform"):
                technique.transform(self)

    def backward(self, proceed: Callable[[Tensor], Any], loss: Tensor) -> Any:
        """Run backward of a micro-batch: the techniques' seams, and the window's weight."""
        weight = self.window.weight
        if weight == 0:
            return loss

        def counted(loss: Tensor) -> Any:
            result = proceed(loss)
            self.window.count()  # only now: what a failing backward leaves is no gradient
            return result

        return self.around("backward", counted)(loss if weight == 1 else loss * weight)

    def end(self) -> None:
        """Undo what the techniques did; a second call does nothing."""
        self.ended = True
        for technique in self.techniques:
            if technique.ctx is self:
                technique.ctx = None
        self.undo.close()
