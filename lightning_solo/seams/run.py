"""The context of one run of a Trainer: its techniques in their order, the accumulation window, and the undo stack."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_solo.cards.catalogue import chosen_of
from lightning_solo.cards.configuration import Configuration, refuse
from lightning_solo.errors import ConflictError, GradientError, listed
from lightning_solo.seams import patches
from lightning_solo.seams.engines import engine_of
from lightning_solo.seams.homes import home_of, part

if TYPE_CHECKING:
    from lightning_solo.optim.gradient_release import StepInBackward
    from lightning_solo.seams.technique import Checkpoint, Technique


class Window:
    """The micro-batches between two optimizer steps.

    Attributes:
        latest: epoch and index of the latest batch.
        held: sum of the weights of this window's micro-batches that have added a gradient. Each counts once, even if
            its backward runs several times.
        weight: factor of a micro-batch's loss before backward. At 0 backward is skipped, because the mean over no
            elements has NaN as its gradient.
        varies: whether the factor may change during the run.
        start: index of the window's first batch, if the factor varies.
        gradients_stay: whether parameters still have their gradients at the optimizer step. If not, a short window is
            corrected by the weights of its losses.
        gradients_saved: whether a checkpoint within a window contains the window's gradients.
        waits: whether the latest batch hasn't run yet, but waits for the last one of its step.
        repeats: whether a failed micro-batch can run again after its gradients are zeroed.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counted = False
        self.latest: tuple[int, int] | None = None
        self._warned = False
        self.held = 0.0
        self.weight = 1.0
        self.varies = False
        self.start = 0
        self.gradients_stay = self.gradients_saved = True
        self.repeats = True
        self.waits = False

    @property
    def factor(self) -> int:
        """Micro-batches per optimizer step; Lightning divides each loss by it."""
        return int(self._trainer.accumulate_grad_batches)

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer step may take several micro-batches."""
        return self.factor > 1 or self.varies

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after this micro-batch: the factor is reached, or the epoch ends."""
        return patches.steps_next(self._trainer)

    def before(self, batch_idx: int) -> int:
        """Return the index of a batch in its window, which is the number of batches before it."""
        start = self.start if self.start <= batch_idx else 0  # a later start is of the previous epoch
        return (batch_idx - start) % self.factor

    def begins(self, batch_idx: int) -> bool:
        """Return whether the next batch is the first of its window; earlier ones may have been None."""
        before = self.before(batch_idx)
        first = self._trainer.current_epoch, batch_idx - before
        return before == 0 or (self.latest is not None and self.latest < first)

    def start_batch(self, batch_idx: int) -> None:
        """Begin a micro-batch, and a window with its first one."""
        self._counted = self.waits = False
        if self.begins(batch_idx):
            self.held = 0.0
            if not self._warned:
                self._warned = warn_of_short_epoch(self._trainer)
        self.latest = self._trainer.current_epoch, batch_idx

    def count(self) -> None:
        """Add the weight of the current micro-batch, once."""
        self.held += 0 if self._counted else self.weight
        self._counted = True


def warn_of_short_epoch(trainer: Any) -> bool:
    """Warn if an epoch has fewer batches than an optimizer step takes; return whether it has."""
    factor, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    if factor <= batches or trainer.fast_dev_run:
        return False
    warnings.warn(
        f"an optimizer step takes {factor} batches, but an epoch has only {batches}: each epoch is one step of"
        f" {batches} batches. Set at most {batches} batches per step (accumulate_grad_batches, or the milestones or"
        " global_batch of a technique), or train on more data",
        stacklevel=2,
    )
    return True


class Run:
    """The context of one fit, validation, test or prediction; every seam receives it.

    Attributes:
        strategy: the Trainer's strategy.
        trainer: a Trainer of either home.
        home: the package of the Trainer, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        window: the current accumulation window.
        release: the mechanism that uses gradients in backward; None if parameters keep them until the step.
        is_set_up: whether module and optimizers are ready.
        undo: stack of functions that restore the module and Lightning's objects. It is closed once, after the run or
            its failure.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self.strategy = strategy
        self.trainer = trainer
        self.home = home_of(trainer)
        self.window = Window(trainer)
        self.release: StepInBackward | None = None
        self.undo = ExitStack()
        self.is_set_up = False
        self.ended = False
        self.techniques: list[Technique] = []
        self._transformed = False
        self._with: dict[str, list[Technique]] = {}
        self._with_loss: set[Technique] = set()  # techniques whose `loss` was called since the last step

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
        """Add a technique to this run, in the order of phases.

        Raises:
            ConflictError: another technique or the strategy already replaces optimizers or steps; or the technique
                can't be combined with another one, by their cards.
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
        """Refuse techniques whose cards can't be combined; some may come from a preset and some from the user."""
        others = [*self.techniques, self.strategy]
        others = [other for other in others if type(other) is not type(technique)]  # `_require_sole` refuses those
        chosen = [each for each in map(chosen_of, [*others, technique]) if each is not None]
        configuration = Configuration(techniques=tuple(chosen))
        engine = "" if configuration.engine else engine_of(self.strategy)  # of a strategy that has no card
        refuse((*configuration.rivalries(), *configuration.under_engine(engine)))
        overfit, newest = self.trainer.overfit_batches, chosen_of(technique)
        if overfit and newest is not None and "batches" in newest.owned():
            raise ConflictError(
                f"{newest.choice} and overfit_batches={overfit}: its batches change with each epoch, so that"
                " nothing is overfitted; write overfit_batches=0 with a torch.utils.data.Subset of few items, or"
                f" {newest.removal} (removes {newest.card.name})"
            )

    def _require_sole(self, technique: Technique) -> None:
        name = type(technique).__name__
        if any(type(other) is type(technique) for other in self.techniques):
            raise ConflictError(f"two {name} in one run: drop one")
        kinds = {cls.__name__ for cls in type(self.strategy).__mro__}
        if "ParallelStrategy" in kinds and not (engine_of(self.strategy) and chosen_of(technique)):
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
        """Return ``proceed`` with the techniques' seams around it, the first phase outermost.

        The returned function raises `ConflictError` if a technique doesn't call ``proceed`` although others act inside.
        """
        return nested(seam, [(each, partial(getattr(each, seam), self)) for each in self.having(seam)], proceed)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the techniques' changes of checkpoints, by phase."""
        return [technique.checkpoint(self) for technique in self.having("checkpoint")]

    def load_states(self, proceed: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``proceed``, which loads optimizer states, with the techniques' changes around it; see `around`."""
        loads = [(each, each.checkpoint(self).load_states) for each in self.having("checkpoint")]
        return nested("load_states", loads, proceed)

    def loss(self, proceed: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``proceed`` with the techniques' ``loss`` around it; an outer one may run the inner ones on parts."""
        for technique in reversed(self.having("loss")):
            proceed = partial(self._loss_of_part, technique, proceed)
        return proceed

    def _loss_of_part(self, technique: Technique, proceed: Callable[..., Any], **outer: Any) -> Any:
        def within(weight: float = 1.0, **inner: Any) -> Any:
            return proceed(**{**outer, **inner, "weight": weight * outer.get("weight", 1.0)})

        self._with_loss.add(technique)
        return technique.loss(self, within)

    def end_step(self) -> None:
        """End an optimizer step.

        Raises:
            ConflictError: a technique's ``loss`` never called ``proceed`` in this step, although others act inside. It
                may omit the call in some micro-batches, which then wait for the step's last one.
        """
        for outer, inner in pairwise(self.having("loss")):
            if outer in self._with_loss and inner not in self._with_loss:
                raise left_out("loss", outer, inner)
        self._with_loss.clear()

    def transform(self) -> None:
        """Transform the module once: after ``configure_model``, before it moves to the device."""
        if not self._transformed:
            self._transformed = True
            for technique in self.having("transform"):
                with self.naming_lazy(technique):
                    technique.transform(self)

    @contextmanager
    def naming_lazy(self, technique: Technique) -> Iterator[None]:
        """Let a technique act on the module; refuse it by name where it needs the shape of a lazy layer's parameter.

        Raises:
            ConflictError: it does.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if "uninitialized parameter" not in str(error):
                raise
            lazy = [name for name, p in self.module.named_parameters() if is_lazy(p)]
            raise ConflictError(
                f"{type(technique).__name__} and {listed(lazy)}, which have no shape before the module's first batch;"
                " write the input sizes of these layers, or run the module on a batch before the fit"
            ) from error

    def backward(self, proceed: Callable[[Tensor], Any], loss: Tensor) -> Any:
        """Run backward of a micro-batch: the techniques' seams, and the window's weight."""
        weight = self.window.weight
        if weight == 0:
            return loss

        def counted(loss: Tensor) -> Any:
            result = proceed(loss)
            self.window.count()  # only now: a failed backward leaves no gradient
            return result

        return self.around("backward", counted)(loss if weight == 1 else loss * weight)

    def locate(self, error: GradientError) -> None:
        """Add step and batch to an error."""
        if self.window.latest is not None:
            error.locate(int(self.trainer.global_step), *self.window.latest)

    def end(self) -> None:
        """Undo the techniques' changes; a second call does nothing."""
        self.ended = True
        for technique in self.techniques:
            if technique.ctx is self:
                technique.ctx = None
        self.undo.close()


def nested(
    seam: str, acts: Sequence[tuple[Technique, Callable[..., Any]]], proceed: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``proceed`` inside functions that take it as their first argument, the first function outermost."""
    inner: Technique | None = None
    for technique, act in reversed(acts):
        proceed = partial(act, proceed) if inner is None else partial(_proceeding, seam, technique, act, inner, proceed)
        inner = technique
    return proceed


def _proceeding(
    seam: str,
    technique: Technique,
    act: Callable[..., Any],
    inner: Technique,
    proceed: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    proceeded = False

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal proceeded
        proceeded = True
        return proceed(*args, **kwargs)

    result = act(watched, *args, **kwargs)
    if not proceeded:
        raise left_out(seam, technique, inner)
    return result


def left_out(seam: str, outer: Technique, inner: Technique) -> ConflictError:
    """Return the error of a technique that keeps another one from acting."""
    names = type(outer).__name__, type(inner).__name__
    return ConflictError(
        f"{names[0]} and {names[1]}: {names[0]}.{seam} returned without calling proceed, so {names[1]}.{seam} never"
        f" ran; call proceed in {names[0]}.{seam}, or drop one of them"
    )


def optimizer_steps(trainer: Any) -> int:
    """Return how often each optimizer has stepped; several are taken to step equally often."""
    return int(trainer.global_step) // max(1, len(trainer.optimizers))
