"""Finite guard: loss and gradients are looked at before an optimizer changes weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.checkpoint.damage import refuse_damaged
from lightning_solo.data.nested import leaves, tensors_of
from lightning_solo.errors import CheckpointError, ConflictError, RefusedStepError
from lightning_solo.memory.late_values import LateValues
from lightning_solo.memory.sharded_tensors import local
from lightning_solo.nn.non_finite import explain
from lightning_solo.nn.rollback import RandomStates, Rollback, attributes_kept
from lightning_solo.optim.gradient_checks import found_non_finite
from lightning_solo.optim.split_optimizer import SplitOptimizer
from lightning_solo.seams import patches, resuming
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.finite_guard.card import CARD, Settings
from lightning_solo.techniques.finite_guard.spikes import SIGMAS, STEPS, Spikes
from lightning_solo.units import format_bytes

_is_sparse = attrgetter("is_sparse")
KEPT_BYTES = 2**23
"""Bytes above which a batch is not kept while the next micro-batches of its window run."""


@dataclass(eq=False)
class _Call:
    """A call of ``training_step`` in the current window."""

    arguments: tuple[Any, ...]  # batch and index, as ``training_step`` got them; empty if the batch isn't kept
    place: tuple[int, int]  # epoch and index of the batch
    random: list[Any]  # states of the random generators before it
    losses: list[Tensor] = field(default_factory=list)  # what backward got of it, divided by the accumulation factor


@dataclass(eq=False)
class _Waiting:
    """What the device looks at, and the host reads later."""

    values: LateValues  # the losses of a window; for a fused optimizer then 1 if its step wasn't taken, else 0
    calls: list[_Call]  # of the window
    scale: float  # the mean loss of the window, divided by the sum of what backward got
    step: int  # number of the optimizer step
    fused: Optimizer | None  # the fused optimizer, which raises no error


class FiniteGuard(Technique, Settings):
    """Keeps a loss or gradient that is infinite or NaN from the weights, and names the module that it came from.

    With ``policy=stop`` the fit raises `RefusedStepError`; parameters, optimizer states, schedulers and buffers are as
    before the step. With ``policy=skip_window`` the step and its batches are dropped: neither ``global_step`` nor
    schedulers that step with it count them. Random numbers go on. With ``policy=rewind`` weights, optimizer states,
    schedulers and ``global_step`` return to the last checkpoint that this run has saved, and training goes on with the
    next batches.

    Attributes:
        skipped_windows: steps that were skipped in this fit.
        rewinds: how often this fit went back to a checkpoint.
        skipped_by_scaler: steps that the scaler of ``16-mixed`` skipped in this fit, to find a loss scale.
    """

    phase = CARD.phase
    _calls: list[_Call]
    _culprit: _Call | None  # whose loss isn't finite
    _is_spike: bool
    _updates: int  # looks in this window: an optimizer may evaluate several times
    _norms: dict[Optimizer, Tensor]  # of all gradients, where they are clipped by it
    _mean: float | None
    _late: _Waiting | None  # the earlier window that turned out wrong

    def _init_state(self) -> None:
        self.skipped_windows = self.rewinds = self.skipped_by_scaler = 0
        self._in_a_row = 0
        self._step = 0  # number of the optimizer step that the latest batch belongs to
        self._skipped_batch = False  # whether the latest batch ended with a skipped step
        self._scale = 0.0  # of losses, under `16-mixed`
        self._stepped = False  # whether an optimizer stepped in this window, for `16-mixed`
        self._paths: list[Any] = []  # of the checkpoints that this run has saved
        self._returns: dict[str, int] = {}  # how often the run went back to each
        self._unsaved = ExitStack()  # open after weights were changed by a step that must not be taken
        self._processes = 1
        self._spikes = Spikes()
        self._waiting: _Waiting | None = None
        self._rollback: Rollback | None = None
        self._random: RandomStates | None = None
        self._may_drop = self.option_of("skip_window", "rewind") is not None
        self._take_out: Callable[[], None] | None = None  # undoes the window's part of logged means
        self._begin_window()

    def _begin_window(self) -> None:
        # a class with frozen settings sets single attributes slowly
        vars(self).update(_calls=[], _culprit=None, _is_spike=False, _updates=0, _norms={}, _mean=None, _late=None)

    # --- a fit ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Join the run of a fit, after which checkpoints are saved again."""
        super().setup(trainer, pl_module, stage)
        self._unsaved.close()

    def transform(self, ctx: Run) -> None:
        """Refuse several processes that would go back to a checkpoint."""
        self._processes = ctx.trainer.world_size
        if self._processes > 1 and (option := self.option_of("rewind")):
            raise ConflictError(
                f"{option}=rewind and {self._processes} processes, which don't go back to a checkpoint together; write"
                f" {option}=stop"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look at losses and gradients from here on."""
        ctx = self.ctx
        assert ctx is not None  # joined in setup
        option = self.option_of("skip_window")
        if option and ctx.release is not None and ctx.release.measures:
            raise ConflictError(
                f"{option}=skip_window and callback.weights_on_host, which steps in the second backward of each batch;"
                " write callback.weights_on_host.clipping=deferred, which keeps gradients until the step, or"
                f" {option}=stop"
            )
        if option and ctx.release is not None and ctx.release.immediate:
            raise ConflictError(
                f"{option}=skip_window and {ctx.release.option}, which steps in backward, before all gradients"
                f" are known; write Trainer(gradient_clip_val=1.0), which keeps them until the step, or {option}=stop"
            )
        if option := self.option_of("rewind"):
            self._require_checkpoints(ctx, option)
        self.skipped_windows = self.rewinds = self.skipped_by_scaler = 0
        self._returns.clear()
        self._rollback = self._random = None
        self._skipped_batch = self._stepped = False
        self._begin_window()
        precision = ctx.strategy.precision_plugin
        enter = ctx.undo.enter_context
        enter(patches.before_updates(precision, partial(self._look, ctx)))
        enter(patches.clipped_norms(precision, self._record_norm))
        if pl_module.automatic_optimization:
            enter(patches.guarded_batches(trainer, partial(self._batch, ctx), lambda: self._skipped_batch))
        else:
            enter(patches.steps_through(ctx.strategy, partial(self._manual_step, ctx)))
        if (scaler := patches.scaler_of(precision)) is not None:
            self._scale = scaler.get_scale()
            for optimizer in trainer.optimizers:
                ctx.undo.callback(optimizer.register_step_post_hook(self._note_step).remove)
        ctx.undo.callback(self._stop)

    def _require_checkpoints(self, ctx: Run, option: str) -> None:
        """Refuse to go back where nothing is saved, or where that would happen within the module's own step."""
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"{option}=rewind and {type(ctx.module).__name__}.automatic_optimization=False: a checkpoint can't be"
                f" loaded within training_step; write {option}=stop"
            )
        if not ctx.trainer.checkpoint_callbacks:
            raise ConflictError(
                f"{option}=rewind and Trainer(enable_checkpointing=False): there is no checkpoint to go back to; add"
                f" ModelCheckpoint(every_n_train_steps=100), or write {option}=stop"
            )
        self._paths = [ctx.trainer.ckpt_path] if ctx.trainer.ckpt_path else []
        ctx.undo.enter_context(patches.saves_noted(ctx.strategy, self._paths.append))

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _stop(self) -> None:
        self._waiting = None
        self._rollback = self._random = None
        self._begin_window()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a window."""
        self._begin_window()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Go on after a skipped step, with its number."""
        if self._skipped_batch:
            self._skipped_batch = False
            patches.correct_logged_steps(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save nothing after a step that wasn't taken."""
        if self.ctx is not None:
            self._settle(self.ctx)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Read what the last step found."""
        assert self.ctx is not None  # joined in setup
        self._settle(self.ctx)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save nothing of a fit that fails, or is interrupted, after a step that wasn't taken."""
        super().on_exception(trainer, pl_module, exception)
        try:
            self._judge_waiting()
        except RefusedStepError:
            self._save_nothing(trainer)

    # --- looking ---

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note batch, buffers and random numbers, for a second pass."""
        if self._rollback is None or self._random is None:
            self._rollback, self._random = Rollback(ctx.module, ctx.device), RandomStates(ctx.module, ctx.device)
        if self._updates or not ctx.module.automatic_optimization:
            self._calls.clear()  # the optimizer evaluates again; or the window is not known
        if not self._calls:
            if not self._updates:
                self._rollback.save(random=False)
                self._take_out = patches.logged_sums(ctx.trainer) if self._may_drop else None
        elif sum(tensor.nbytes for tensor in tensors_of(self._calls[-1].arguments[:1])) > KEPT_BYTES:
            self._calls[-1].arguments = ()
        place = ctx.window.latest or (0, 0)
        if len(args) > 1 and type(args[1]) is int:
            place = place[0], args[1]
        self._calls.append(_Call(args, place, self._random.get()))
        with nullcontext() if self._random.is_known else self._random.watching():
            return proceed(*args, **kwargs)

    def rewind(self, ctx: Run) -> Callable[[], None]:
        """Return a function that forgets the calls from now on."""
        count = len(self._calls)

        def restore() -> None:
            del self._calls[count:]

        return restore

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Note the loss; look at it now if gradients are used in backward."""
        if not self._calls:  # under manual optimization, after a step of this batch that was skipped
            self._calls.append(_Call((), ctx.window.latest or (0, 0), []))
        self._calls[-1].losses.append(loss.detach().reshape(()))
        if ctx.release is not None and ctx.release.immediate:
            self._judge(ctx, None)
        return proceed(loss)

    def _record_norm(self, optimizer: Optimizer, norm: Tensor) -> None:
        self._norms[optimizer] = norm

    def _look(self, ctx: Run, optimizer: Optimizer) -> None:
        """Look at losses and gradients before an update."""
        try:
            if self._waiting is not None:
                self._judge_waiting()
            if ctx.release is not None and ctx.release.immediate:
                return  # looked at in backward
            scales = patches.scaler_of(ctx.strategy.precision_plugin) is not None
            if scales or ctx.device.type != "cuda" or not self._looks_on_device(ctx, optimizer):
                self._judge(ctx, None if scales else self._non_finite(optimizer))
        except RefusedStepError as error:
            error.touched = error.touched or self._updates > 0
            raise
        finally:
            self._updates += 1
            self._norms.clear()

    def _looks_on_device(self, ctx: Run, optimizer: Any) -> bool:
        """Return whether losses and gradients are looked at by the step itself, without another wait.

        Released gradients and split optimizers look at their gradients anyway, and raise the error. A fused optimizer
        of torch reads on the device whether to step; the host learns it later, which is early enough to stop.
        """
        losses = [loss for call in self._calls for loss in call.losses]
        if (
            self._processes > 1
            or not losses
            or self.spike not in ("ignore", "warn")
            or not ctx.module.automatic_optimization
        ):
            return False
        values, fused = torch.stack(losses), None
        if ctx.release is not None:
            ctx.release.losses = values
        elif isinstance(optimizer, SplitOptimizer):
            optimizer.losses = values
        elif self.policy == "stop" and optimizer.defaults.get("fused"):
            found = self._non_finite(optimizer)
            wrong = values.isfinite().all().logical_not().float()
            fused, optimizer.found_inf = optimizer, wrong if found is None else wrong.maximum(found.float())
            values = torch.cat([values.float(), optimizer.found_inf.view(1)])
        else:
            return False
        scale = ctx.window.factor / (ctx.window.held or 1)
        self._waiting = _Waiting(LateValues(values), [*self._calls], scale, self._step, fused)
        return True

    def _judge_waiting(self) -> None:
        """Read what the device found, and raise `RefusedStepError` if a fused optimizer didn't step."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        values = waiting.values.read()
        if waiting.fused is None or not values.pop():
            self._note_mean(math.fsum(values) * waiting.scale, waiting.step)
            return
        self._calls, self._late = waiting.calls, waiting
        raise self._wrong_loss(values) or RefusedStepError("a gradient is not finite")

    def _settle(self, ctx: Run) -> None:
        try:
            self._judge_waiting()
        except RefusedStepError as error:
            failure = error
        else:
            return
        self._decide(ctx, failure, ctx.trainer.optimizers)

    def _wrong_loss(self, values: Sequence[float]) -> RefusedStepError | None:
        """Return the error for the first loss of the window that isn't finite, or None."""
        if all(map(math.isfinite, values)):
            return None
        calls = [call for call in self._calls for _ in call.losses]
        self._culprit, value = next(pair for pair in zip(calls, values, strict=True) if not math.isfinite(pair[1]))
        return RefusedStepError(f"the loss is {value}")

    def _non_finite(self, optimizer: Optimizer) -> Tensor | None:
        """Return 1 if a gradient isn't finite, else 0; None where the optimizer looks at them itself."""
        norm = self._norms.get(optimizer)
        if norm is not None:
            return local(norm).isfinite().logical_not()
        looks_itself = isinstance(optimizer, SplitOptimizer) and self._processes == 1  # each of several at its shards
        if looks_itself or hasattr(optimizer, "overflow"):  # DeepSpeed's
            return None
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._processes > 1:
            gradients = [shard for shard in map(local, gradients) if shard.numel()]
        if any(map(_is_sparse, gradients)):
            gradients = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        return found_non_finite(gradients) if gradients else None

    def _judge(self, ctx: Run, gradients: Tensor | None) -> None:
        """Wait for the device once, and raise `RefusedStepError` if the step must not be taken by all processes."""
        losses = [loss for call in self._calls for loss in call.losses]
        *values, found = _read([*losses, gradients])
        error = self._wrong_loss(values) or (RefusedStepError("a gradient is not finite") if found else None)
        # Lightning divides each loss by the factor
        mean = math.fsum(values) * ctx.window.factor / (ctx.window.held or 1) if error is None else 0.0
        if self._processes > 1:
            own = torch.tensor([float(error is not None), mean], dtype=torch.float64, device=ctx.device)
            wrong, total = ctx.strategy.reduce(own, reduce_op="sum").tolist()
            mean = total / self._processes
            if wrong and error is None:
                error = RefusedStepError("a loss or gradient of another process is not finite")
        if error is not None:
            raise error
        if values and self.spike != "ignore" and ctx.module.automatic_optimization:
            self._note_mean(mean, self._step)

    def _note_mean(self, loss: float, step: int) -> None:
        """Compare the mean loss of a window with those of the last steps."""
        if self.spike == "ignore":
            return
        bound = self._spikes.bound()
        if loss > bound:
            text = f"the loss {loss:.4g} is above {bound:.4g}, {SIGMAS:.0f} sigma above the last {STEPS} steps"
            if self.spike != "warn":
                self._is_spike = True
                raise RefusedStepError(text)
            warnings.warn(f"FiniteGuard: {text} (optimizer step {step})", stacklevel=2)
        self._mean = loss

    def _which(self, call: _Call) -> str:
        number, count = self._calls.index(call) + 1, len(self._calls)
        return f" in micro-batch {number} of {count}" if count > 1 else ""

    # --- deciding ---

    def _batch(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a batch under automatic optimization; skip its step if it must not be taken."""
        self._step = int(ctx.trainer.global_step)
        try:
            result, ends = proceed(*args, **kwargs), ctx.window.is_last
            if ends and patches.engine_left_out(ctx.strategy):
                self._left_out_by_engine(ctx)
        except RefusedStepError as error:
            failure = error
        else:
            if ends:
                self._end_window(ctx)
            return result
        self._decide(ctx, failure, ctx.trainer.optimizers)
        self._skipped_batch = True
        return {}

    def _manual_step(self, ctx: Run, proceed: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer under manual optimization, unless the step must not be taken."""
        self._step = int(ctx.trainer.global_step)
        try:
            result = proceed(optimizer, *args, **kwargs)
        except RefusedStepError as error:
            failure = error
        else:
            self._in_a_row = 0
            for call in self._calls:
                call.losses.clear()  # those of the next optimizer follow
            self._updates = 0
            return result
        self._decide(ctx, failure, [optimizer])
        return None

    def _end_window(self, ctx: Run) -> None:
        """End a window whose step was taken, or left out by the scaler of ``16-mixed``."""
        self._in_a_row = 0
        if self._waiting is not None:
            if self._waiting.fused is None:
                self._judge_waiting()  # the optimizer has waited for the device
            self._step_anew(ctx)
        if self._mean is not None:
            self._spikes.add(self._mean)
        self._begin_window()
        scaler = patches.scaler_of(ctx.strategy.precision_plugin)
        if scaler is not None:
            self._count_left_out(scaler, ctx)

    def _step_anew(self, ctx: Run) -> None:
        """Let the next step be taken whatever this one's losses were."""
        if ctx.release is not None:
            ctx.release.losses = None
        for optimizer in ctx.trainer.optimizers:
            if isinstance(optimizer, SplitOptimizer):
                optimizer.losses = None
            vars(optimizer).pop("found_inf", None)

    def _left_out_by_engine(self, ctx: Run) -> None:
        """Count a step that the engine left out to find a loss scale."""
        if not ctx.precision.startswith("16"):
            raise RefusedStepError("a gradient is not finite, and the engine has left out the step")
        self.skipped_by_scaler += 1
        patches.log_metrics(ctx.trainer, {"finite_guard/skipped_by_scaler": self.skipped_by_scaler})

    def _count_left_out(self, scaler: Any, ctx: Run) -> None:
        """Count a step that the scaler left out."""
        stepped, self._stepped = self._stepped, False
        if any(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in ctx.trainer.optimizers):
            before, self._scale = self._scale, scaler.get_scale()  # a fused one is called all the same
            stepped = self._scale >= before
        if stepped:
            return
        self.skipped_by_scaler += 1
        scale = scaler.get_scale()
        counted = {"finite_guard/loss_scale": scale, "finite_guard/skipped_by_scaler": self.skipped_by_scaler}
        patches.log_metrics(ctx.trainer, counted)
        if scale < self.min_loss_scale:
            error = RefusedStepError(
                f"the loss scale has fallen to {scale:.3g}, below callback.finite_guard.min_loss_scale="
                f"{self.min_loss_scale}: gradients overflow in fp16 at any scale; write precision=bf16-mixed, or lower"
                " the learning rate and resume from an earlier checkpoint"
            )
            if ctx.window.latest is not None:
                error.locate(self._step, *ctx.window.latest)
            raise error

    def _decide(self, ctx: Run, failure: RefusedStepError, optimizers: Sequence[Optimizer]) -> None:
        """Drop the window, and return if its step is skipped."""
        self._step_anew(ctx)
        if self._waiting is not None and self._waiting.fused is None:
            waiting, self._waiting = self._waiting, None
            failure = self._wrong_loss(waiting.values.read()) or failure  # the optimizer doesn't know which loss it was
        calls, culprit, is_spike, late = self._calls, self._culprit, self._is_spike, self._late
        self._drop(ctx, optimizers)
        cause = None
        if not is_spike:
            cause, culprit = self._cause(ctx, [culprit] if culprit is not None else calls, culprit is None)
        place = ctx.window.latest if culprit is None else culprit.place
        reason = failure.reason + ("" if culprit is None else self._which(culprit))
        self._begin_window()
        policy = self.spike if is_spike else self.policy
        self._in_a_row += 1
        text = f"{reason}; {cause}" if cause else reason
        if policy == "skip_window" and not failure.touched and self._in_a_row <= self.max_skips:
            self.skipped_windows += 1
            ctx.info(f"finite_guard: skipped optimizer step {self._step}, batch {place}: {text}")
            patches.log_metrics(ctx.trainer, {"finite_guard/skipped_windows": self.skipped_windows})
            return
        if policy == "rewind" and self._went_back(ctx, optimizers, f"batch {place}: {text}"):
            return
        error = RefusedStepError(f"{text}; {self._remedy(policy, failure.touched, is_spike)}", touched=failure.touched)
        if failure.touched or late is not None:  # schedulers and buffers have gone on
            self._save_nothing(ctx.trainer)
        if place is not None:
            error.locate(self._step if late is None else late.step, *place)
        raise error from None

    def _went_back(self, ctx: Run, optimizers: Sequence[Optimizer], text: str) -> bool:
        """Go back to the newest checkpoint of this run that can be read; return whether there is one."""
        step = ctx.trainer.global_step
        for path in reversed(self._paths):
            returns = self._returns.get(str(path), 0)
            if returns >= self.max_skips:
                return False
            try:
                refuse_damaged(Path(path), "an earlier one")
                checkpoint = ctx.strategy.load_checkpoint(path)  # waits for one that is still being written
            except FileNotFoundError:  # removed since, as ModelCheckpoint(save_top_k=1) does
                continue
            except CheckpointError as error:
                warnings.warn(f"FiniteGuard: {error}", stacklevel=2)
                continue
            steps = resuming.go_back(ctx.trainer, checkpoint)
            for optimizer in optimizers:
                optimizer.zero_grad()
            self._returns[str(path)] = returns + 1
            self.rewinds += 1
            ctx.info(f"finite_guard: went back from optimizer step {step} to {steps}, {path}; {text}")
            patches.log_metrics(ctx.trainer, {"finite_guard/rewinds": self.rewinds})
            return True
        return False

    def _save_nothing(self, trainer: Any) -> None:
        self._unsaved.enter_context(patches.saves_refused(trainer, self._refuse_save))

    def _refuse_save(self, fails: bool) -> None:
        text = "its state isn't that before the step that failed; resume from the last checkpoint"
        if not fails:
            raise CheckpointError(f"FiniteGuard: the fit failed, and {text}")
        warnings.warn(f"FiniteGuard: no checkpoint is saved of the failed fit: {text}", stacklevel=2)

    def _remedy(self, policy: str, touched: bool, is_spike: bool) -> str:
        if policy == "rewind":
            return (
                f"no checkpoint of this run is left that it hasn't gone back to {self.max_skips} times"
                " (callback.finite_guard.max_skips): save earlier, as by ModelCheckpoint(every_n_train_steps=100), or"
                " resume from an earlier checkpoint with a lower learning rate"
            )
        if touched:
            return (
                "weights have been changed: resume from the last checkpoint; where gradients are released, write"
                " Trainer(gradient_clip_val=1.0), which keeps them until the step"
            )
        if policy == "skip_window":
            return (
                f"it is skipped step {self._in_a_row} in a row, and callback.finite_guard.max_skips={self.max_skips}:"
                " resume from an earlier checkpoint with a lower learning rate, or look at the module"
            )
        setting = "spike" if is_spike else "policy"
        return (
            "no weight has been changed by this step; repair module or batch, or write"
            f" callback.finite_guard.{setting}=skip_window to drop such steps"
        )

    def _drop(self, ctx: Run, optimizers: Sequence[Optimizer]) -> None:
        """Drop the gradients of the window, and restore buffers, metrics and the scaler."""
        for optimizer in optimizers:
            optimizer.zero_grad()
            patches.forget_unscaling(ctx.strategy.precision_plugin, optimizer)
        if self._rollback is not None and self._calls and ctx.module.automatic_optimization:
            self._rollback.restore(random=False)
            if self._take_out is not None:
                self._take_out()

    def _cause(self, ctx: Run, calls: Sequence[_Call], of_gradients: bool) -> tuple[str | None, _Call | None]:
        """Return in words where the value comes from and the call, by a second pass that leaves no trace."""
        rollback, random, found = self._rollback, self._random, None
        only = calls[0] if len(calls) == 1 else None
        passes = ctx.module.automatic_optimization and (ctx.window.repeats or not of_gradients)
        if rollback is None or random is None or not passes or self._processes > 1:
            return None, only  # a pass of one process alone would wait for the others
        if not any(call.arguments for call in calls):
            return f"the batch, of more than {format_bytes(KEPT_BYTES)}, was not kept to look for the module", only
        now = RandomStates(ctx.module, ctx.device).get()
        try:
            for call in calls:
                if not call.arguments:
                    continue
                random.put(call.random)
                forward = partial(_loss_of, ctx, call)
                batch = [(path, leaf) for path, leaf in leaves(call.arguments[0]) if isinstance(leaf, Tensor)]
                with attributes_kept(ctx.module):
                    found = explain(ctx.module, batch, forward, of_gradients=of_gradients, root="training_step")
                if found is not None:
                    return found, call
        except Exception as error:  # the first error counts
            return f"a second pass that looks for the module failed with {type(error).__name__}: {error}", only
        finally:
            rollback.restore(random=False)
            random.put(now)
        return "a second pass on the same batch was finite", only

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the last steps, which spikes are compared with, and the skipped steps in a row."""
        return {"losses": [*self._spikes.losses], "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the saved run's losses."""
        if set(state_dict) != {"losses", "in_a_row"}:
            raise CheckpointError(
                f"callback.finite_guard: the checkpoint's state has {', '.join(state_dict)}; expected are losses,"
                " in_a_row"
            )
        self._spikes = Spikes(state_dict["losses"])
        self._in_a_row = int(state_dict["in_a_row"])


def _loss_of(ctx: Run, call: _Call) -> Tensor | None:
    """Return the loss of a call's batch, without techniques' seams and without logging."""
    result = patches.step_result(ctx.trainer, *call.arguments)
    loss: Tensor | None = result["loss"] if isinstance(result, dict) else result
    return loss


def _read(values: Sequence[Tensor | None]) -> list[float]:
    """Return numbers, 0 for None; waits for a device once."""
    given = [value for value in values if value is not None]
    if all(value.is_cpu for value in given):
        numbers = iter([value.item() for value in given])
    else:
        wide = torch.float64 if any(value.dtype is torch.float64 for value in given) else torch.float32
        numbers = iter(torch.stack([value.to(wide) for value in given]).tolist())
    return [0.0 if value is None else next(numbers) for value in values]
