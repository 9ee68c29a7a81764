"""Parameters that step in backward, where their gradients are freed, with any optimizer of a run."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.attributes import replaced
from lightning_solo.cards.released_gradients import scaled_gradients
from lightning_solo.errors import ConflictError
from lightning_solo.memory.sharded_tensors import is_sharded
from lightning_solo.optim.gradient_release import StepInBackward
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.seams import patches
from lightning_solo.seams.engines import shards_parameters
from lightning_solo.seams.homes import home_of, part
from lightning_solo.seams.hooks import gradient_names, uses_gradients
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.units import format_bytes

CLIPPING = {"clip_gradients", "configure_gradient_clipping"}
"""Lightning's functions that clip, under released gradients too."""
VARYING = sys.maxsize
"""Number of micro-batches that stands for a varying one: an open window resumes only in a run with the same number."""


class ReleasedGradients(Technique):
    """Base of techniques that step the optimizer in backward, gradient by gradient.

    Under manual optimization, as of GANs, gradients are kept until the step, and the log says so.

    Attributes:
        option: the technique's, which messages tell how to remove.
        buffer: where gradients are kept for accumulation or clipping by norm, "device" or "host"; on the host if one of
            several techniques keeps them there.
        remedy: what to write where the host has no room for them.
    """

    option: ClassVar[str]
    buffer: str
    remedy: ClassVar[str] = "write callback.gradient_release.buffer=device"

    def _init_state(self) -> None:
        self._release: StepInBackward | None = None
        self._clips_by_hand = self._clipped = False  # whether clip_gradients was called since the last step
        self._zeroed: bool | None = None  # whether zero_grad was called since the last step; None: as by Lightning
        self._is_stepping = False  # whether backward has stepped weights, and no step has ended it
        self._warned: set[str] = set()

    @property
    def kept_on(self) -> str:
        """Where gradients are kept if this technique keeps them."""
        return self.buffer

    @property
    def keep_in(self) -> torch.dtype | None:
        """The type of kept gradients; None: as they come, sums in fp32 or wider."""
        return None

    def measures(self, ctx: Run, release: StepInBackward) -> bool:
        """Return whether a backward of its own measures the norm of gradients, which aren't kept then."""
        return False

    @property
    def _word(self) -> str:
        return self.option.rpartition(".")[2]

    @property
    def release(self) -> StepInBackward | None:
        """The mechanism of this run; None outside a fit, and under manual optimization."""
        return self._release

    def transform(self, ctx: Run) -> None:
        """Refuse a precision that scales gradients until the step.

        Raises:
            ConflictError: the precision is 16-mixed; the message says what to write.
        """
        if message := scaled_gradients(self.option, ctx.precision):
            raise ConflictError(message)

    def optimizers(self, ctx: Run, optimizers: list[Optimizer], schedulers: Sequence[Any]) -> list[Optimizer]:
        """Release the optimizer's gradients; under manual optimization keep them, and log their bytes.

        Raises:
            ConflictError: an optimizer whose step needs all gradients at once; or sharded gradients would be kept.
        """
        if not ctx.module.automatic_optimization:  # two backward calls may come before a step
            kept = format_bytes(sum(p.nbytes for p in ctx.module.parameters() if p.requires_grad))
            ctx.info(f"{self._word}: gradients, {kept} on the device until the step (manual optimization)")
            return optimizers
        (optimizer,) = optimizers  # automatic optimization has one
        self._clips_by_hand = self._look_at_hooks(ctx)
        self._zeroed, self._is_stepping = None, False
        if part(ctx.home, "utilities.model_helpers").is_overridden("optimizer_zero_grad", ctx.module):
            self._zeroed = False
            ctx.undo.enter_context(replaced(optimizer, "zero_grad", partial(self._zero, optimizer.zero_grad)))
        if "parameter_names" not in vars(optimizer):  # for messages
            vars(optimizer)["parameter_names"] = {p: name for name, p in ctx.module.named_parameters()}
            ctx.undo.callback(vars(optimizer).pop, "parameter_names", None)
        value = _bound(ctx.trainer)
        by_value = _by_value(ctx.trainer)
        by_hand = self._clips_by_hand
        released = [each for each in ctx.techniques if isinstance(each, ReleasedGradients)]
        keeper = next((each for each in released if each.buffer == "host"), self)
        self._release = release = StepInBackward(
            optimizer,
            accumulation=_micro_batches(ctx),
            max_norm=math.inf if by_hand or (value and not by_value) else None,
            max_value=value if by_value and not by_hand else None,
            buffer=keeper.kept_on,
            remedy=keeper.remedy,
            option=self.option,
        )
        release.keep_in = keeper.keep_in
        if value and not release.immediate and not by_hand and keeper.measures(ctx, release):
            release.measures, release.max_norm = True, value
        ctx.undo.callback(self._stop)
        if not release.immediate and any(map(is_sharded, parameters_of(optimizer))):
            self._refuse_shards(ctx.trainer, ctx.module, ctx.window.factor)
        if release.buffer == "host" and not release.immediate:
            release.allocate()
        ctx.release, ctx.window.gradients_stay = release, False
        # parameters hold no gradients that Lightning could clip
        ctx.undo.enter_context(patches.without_clipping(ctx.strategy.precision_plugin))
        ctx.info(f"{self._word}: gradients, {self._words(ctx, release)}")
        return optimizers

    def before_processes(self, trainer: Any) -> None:
        """Refuse accumulation and clipping that would keep gradients of shards.

        Raises:
            ConflictError: the engine is `fsdp`, and the Trainer accumulates or clips by norm.
        """
        if shards_parameters(trainer.strategy):
            self._refuse_shards(trainer, trainer.lightning_module, trainer.accumulate_grad_batches)

    def _refuse_shards(self, trainer: Any, module: Any, factor: int) -> None:
        """Refuse to keep gradients of shards until the step."""
        start, rest = f"{self.option} and strategy=fsdp can't be combined with", f"or ~{self.option}"
        if factor > 1:
            raise ConflictError(
                f"{start} accumulate_grad_batches={factor}: a process would keep its shards of all gradients until the"
                f" step, and release none; write accumulate_grad_batches=1, {rest}"
            )
        if _clips_by_hand(module):
            raise ConflictError(
                f"{start} {type(module).__name__}.configure_gradient_clipping: it clips after backward, in which"
                f" shards have stepped; drop it, {rest}"
            )
        if (value := _bound(trainer)) and not _by_value(trainer):
            raise ConflictError(
                f"{start} gradient_clip_val={value}: each block's shards step in backward, before the norm of all"
                f" gradients is known; drop gradient_clip_val, write gradient_clip_algorithm='value', {rest}"
            )

    def _look_at_hooks(self, ctx: Run) -> bool:
        """Warn of hooks that will find no gradients; return whether the module overrides Lightning's clipping."""
        overridden = part(ctx.home, "utilities.model_helpers").is_overridden
        callback = part(ctx.home, "callbacks").Callback
        found: list[tuple[str, Any]] = []
        if overridden("backward", ctx.module) and uses_gradients(ctx.module.backward):
            found.append(("backward", ctx.module))
        for hook in ("on_after_backward", "on_before_optimizer_step"):
            found += [(hook, ctx.module)] if overridden(hook, ctx.module) else []
            found += [
                (hook, each)
                for each in ctx.trainer.callbacks
                if not type(each).__module__.startswith("lightning_solo.")
                and overridden(hook, each, callback)
                and uses_gradients(getattr(each, hook))
            ]
        for hook, owner in found:
            self._warn_once(
                f"{type(owner).__name__}.{hook} finds no .grad: gradients are released in backward; to log their"
                f" norms write +callback=gradient_norm; if it changes gradients, write ~{self.option}"
            )
        if not _clips_by_hand(ctx.module):
            return False
        names = gradient_names(ctx.module.configure_gradient_clipping)
        if names and names.isdisjoint(CLIPPING):
            raise ConflictError(
                f"{type(ctx.module).__name__}.configure_gradient_clipping clips by itself, but parameters have no"
                " .grad there, since gradients are released in backward; call self.clip_gradients(optimizer, bound,"
                f" 'norm') in it, or write ~{self.option}"
            )
        return True

    def _words(self, ctx: Run, release: StepInBackward) -> str:
        if release.immediate:
            return "released in backward"
        kept, count = release.kept_bytes, sum(p.numel() for p in ctx.module.parameters() if p.requires_grad)
        each = kept / max(1, count)
        return f"{each:.2f} bytes per parameter: {format_bytes(kept)} on the {release.buffer} until the step"

    def _stop(self) -> None:
        release, self._release = self._release, None
        self._clipped = False
        if release is not None:
            release.remove()

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Run backward, which uses or keeps each gradient.

        Raises:
            ConflictError: the module's ``optimizer_step`` left out the step of the batch before.
        """
        release = self._release
        if release is None:  # manual optimization
            return proceed(loss)
        release.watch()  # include parameters that have been unfrozen since
        if not release.has_kept:  # a window begins; other callbacks may change its length
            release.accumulation = _micro_batches(ctx)
        steps = release.immediate and not release.is_measuring
        if steps and self._is_stepping:
            raise ConflictError(
                f"{type(ctx.module).__name__}.optimizer_step left out the step of a batch, and {self.option} updated"
                " weights in its backward; write optimizer.step(closure=optimizer_closure) for every batch, or"
                f" ~{self.option}"
            )
        result = proceed(loss)
        self._is_stepping = steps
        return result

    def clip(self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, bound: float, by: str) -> None:
        """Clip in the step that follows.

        Raises:
            ConflictError: backward has used the gradients already.
        """
        release = self._release
        if release is None or not bound or bound <= 0:
            proceed(optimizer, bound, by)
            return
        name = "max_value" if by == "value" else "max_norm"
        if release.immediate and getattr(release, name) != bound:
            raise ConflictError(
                f"self.clip_gradients(..., {bound}): gradients are released in backward; write"
                f" Trainer(gradient_clip_val={bound}), or override configure_gradient_clipping and call it there"
            )
        setattr(release, name, float(bound))
        self._clipped = True
        proceed(optimizer, bound, by)

    def step(
        self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Run the window's last micro-batch, which steps in backward, or step with the kept gradients after it."""
        release = self._release
        if release is None:
            return proceed(optimizer, closure, **options)
        try:
            result = closure()
        finally:
            self._is_stepping = False
        if self._clips_by_hand and not self._clipped:
            self._warn_once(
                "configure_gradient_clipping didn't call self.clip_gradients(...), and clipped nothing: gradients are"
                " released in backward, and parameters have no .grad"
            )
        if self._zeroed is not None:
            if not self._zeroed:
                self._warn_once(
                    f"{type(ctx.module).__name__}.optimizer_zero_grad left the gradients of the last step, but they are"
                    f" released in backward, and don't count again; if they are to, write ~{self.option}"
                )
            self._zeroed = False
        release.step()
        self._clipped = False
        if not release.immediate and release.max_norm is not None:
            release.max_norm, release.max_value = math.inf, None  # until the next call of clip_gradients
        # no parameter has a gradient any more; this is for other techniques, the optimizer's hooks and schedulers
        return proceed(optimizer, lambda: result, **options)

    def _zero(self, stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._zeroed = True
        stock(*args, **kwargs)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)


def _bound(trainer: Any) -> float | None:
    """Return what gradients are clipped to; None if they aren't, which Lightning also takes 0 and less for."""
    value = trainer.gradient_clip_val
    return float(value) if value is not None and value > 0 else None


def _by_value(trainer: Any) -> bool:
    """Return whether a Trainer clips by value."""
    algorithm = trainer.gradient_clip_algorithm
    return str(getattr(algorithm, "value", algorithm)) == "value"


def _clips_by_hand(module: Any) -> bool:
    """Return whether a module overrides Lightning's clipping."""
    overridden = part(home_of(module), "utilities.model_helpers").is_overridden
    return bool(overridden("configure_gradient_clipping", module))


def _micro_batches(ctx: Run) -> int:
    """Return the factor, or `VARYING` if it varies: a resumed fit doesn't know it at its start."""
    return VARYING if ctx.window.varies else ctx.window.factor
