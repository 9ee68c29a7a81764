"""Micro-batching: a batch runs in parts that fit, and again in smaller parts after an out-of-memory error."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_solo.cards.card import resources
from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.data.micro_batch_size import MicroBatchSize
from lightning_solo.data.micro_batches import MicroBatch, Splitter
from lightning_solo.data.splitting import is_plain, moved
from lightning_solo.errors import BudgetError, CheckpointError, ConflictError, listed
from lightning_solo.memory.attempts import attempt
from lightning_solo.nn.rollback import Rollback, Unchanged
from lightning_solo.nn.spectral_norms import spectral_norms
from lightning_solo.optim.window_gradients import WindowGradients
from lightning_solo.out_of_memory import is_out_of_memory
from lightning_solo.seams import patches, resuming
from lightning_solo.seams.engines import agreed
from lightning_solo.seams.homes import part
from lightning_solo.seams.hooks import uses_gradients
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.micro_batching.card import CARD, Settings
from lightning_solo.techniques.micro_batching.global_batch import GlobalBatch
from lightning_solo.techniques.micro_batching.gradient_caching import Embedding, embed_by
from lightning_solo.techniques.micro_batching.logged import Logged, merged_outputs, weighted_mean
from lightning_solo.techniques.micro_batching.loss_check import (
    EMBED,
    changes_in_place,
    require_mean,
    tells_weights_apart,
)

LOOKED_AT = 100
"""Split batches in which the check looks for rows with different numbers of labels."""


class NoOutputs(dict[str, Any]):
    """The outputs of a batch that waits for the last batch of its step: empty."""

    def __missing__(self, key: str) -> Any:
        raise ConflictError(
            f"callback.micro_batching: outputs[{key!r}] of a batch that waits for the last one of its optimizer step;"
            f" write outputs.get({key!r}) and leave out None"
        )


class Waiting(NamedTuple):
    """A batch that waits for the last batch of its step."""

    batch: Any
    batch_idx: int


class MicroBatching(Technique, Settings):
    """Runs each batch in micro-batches that fit on the device, with gradient and logged loss of the whole batch.

    After an out-of-memory error in forward or backward the attempt is undone: random numbers, buffers, metrics and
    gradients are restored, and the same batches run again in smaller parts. The size that fits is saved in
    checkpoints, and larger parts are tried again after a while.

    If several of the loader's batches make a step, they wait for the last one and run together, since only then are
    the token weights known.

    Attributes:
        retries: How often batches have run again in this fit.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self.retries = 0
        self._validating = ""  # the validation batch that runs
        self._size = MicroBatchSize(None if self.micro_batch == "auto" else int(self.micro_batch))
        self._splitter = Splitter(self.batch_dim, self.split, self.weight_by)
        self._forget()

    @property
    def fits(self) -> int | None:
        """The current largest number of samples in a micro-batch; None for the whole batch."""
        return self._size.current

    def _forget(self) -> None:
        """Reset the state of a fit."""
        self._global = GlobalBatch(self.global_batch)
        self._rollback: Rollback | None = None
        self._frozen: Unchanged | None = None
        self._checked, self._looked_at = False, 0
        self._embeddings: list[Embedding] = []
        self._resumed: Any = None  # the batches that waited when the checkpoint was saved
        self._begin_window(zeroed=False)

    def _begin_window(self, *, zeroed: bool) -> None:
        self._window: list[Waiting] = []
        self._gradients: WindowGradients | None = None
        self._zeroed = zeroed  # whether Lightning zeroes gradients in this window
        self._counted = 0.0  # batches of this window with a gradient from a checkpoint
        self._ran = False

    # --- a fit ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse conflicting settings of the batches per step, and make the Trainer count steps by ``global_batch``."""
        joins = stage == "fit" and self.ctx is None
        if joins and self.global_batch is not None:
            refuse_callbacks("callback.micro_batching", resources(CARD.owns, self), trainer.callbacks)
            if trainer.accumulate_grad_batches != 1:
                raise ConflictError(
                    f"callback.micro_batching.global_batch={self.global_batch} and accumulate_grad_batches="
                    f"{trainer.accumulate_grad_batches}: both set the batches of a step; drop one of them"
                )
        super().setup(trainer, pl_module, stage)
        if not joins or self.ctx is None:
            return
        ctx = self.ctx
        self.retries = 0
        self._forget()
        ctx.undo.callback(self._forget)
        ctx.window.varies = True  # a batch has several backward passes, none of which may step a weight
        if self.global_batch is not None:
            ctx.undo.callback(setattr, trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches)
            ctx.undo.enter_context(patches.stepping_batches(trainer, self._global.count_steps))

    def transform(self, ctx: Run) -> None:
        """Refuse modules and strategies that don't leave forward and backward to Lightning."""
        name = type(ctx.module).__name__
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"callback.micro_batching and {name}.automatic_optimization=False: the module runs forward and backward"
                " itself; write automatic_optimization=True, or ~callback.micro_batching and split the batch in"
                " training_step"
            )
        if ctx.strategy.handles_gradient_accumulation:
            raise ConflictError(
                f"callback.micro_batching and {type(ctx.strategy).__name__}, which accumulates by itself; write"
                " Trainer(strategy='auto'), or ~callback.micro_batching"
            )
        if "dataloader_iter" in inspect.signature(ctx.module.training_step).parameters:
            raise ConflictError(
                f"callback.micro_batching and {name}.training_step(dataloader_iter), which takes its batches itself;"
                " write training_step(batch, batch_idx), or ~callback.micro_batching"
            )
        self._look_at_gradients(ctx)
        for name in [self.embed] if isinstance(self.embed, str) else self.embed or ():
            embedding = Embedding(f"{EMBED}={name}", self._splitter.split_arguments, check=self.check)
            ctx.undo.callback(embed_by(ctx.module, name, embedding))
            self._embeddings.append(embedding)

    def _look_at_gradients(self, ctx: Run) -> None:
        """Refuse a ``backward`` that uses gradients; warn of hooks of parameters."""
        name = type(ctx.module).__name__
        if part(ctx.home, "utilities.model_helpers").is_overridden("backward", ctx.module) and uses_gradients(
            ctx.module.backward
        ):
            raise ConflictError(
                f"callback.micro_batching and {name}.backward, which uses gradients of micro-batches: move that to"
                " on_after_backward, which runs once per batch, or write ~callback.micro_batching"
            )
        hooked = [
            parameter
            for parameter, p in ctx.module.named_parameters()
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        ]
        if hooked:
            warnings.warn(
                f"callback.micro_batching: hooks of the gradients of {listed(hooked)} run once per micro-batch, on its"
                " part of the gradient; if they are more than a factor or a mask of it, move them to on_after_backward",
                stacklevel=2,
            )

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Read the size of the loader's batches, for the number of batches in a step."""
        self._global.see_loader(loader)
        return loader

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse layers whose output depends on the whole batch, or whose state changes in each forward."""
        layers = [
            name
            for name, part in pl_module.named_modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
        ]
        normed = [name for name, layer in spectral_norms(pl_module).items() if layer.training]
        if normed and self.check:
            raise ConflictError(
                f"callback.micro_batching and spectral_norm ({listed(normed)}), which changes its vectors in each"
                " forward in training mode, and so in each micro-batch; write callback.micro_batching.check=false to"
                " allow that, or ~callback.micro_batching"
            )
        if layers and self.batch_norm == "refuse":
            raise ConflictError(
                f"callback.micro_batching and BatchNorm ({listed(layers)}), whose statistics would be"
                " those of micro-batches; write callback.micro_batching.batch_norm=ghost to allow that, replace the"
                " layers by GroupNorm, or put them into eval mode"
            )
        if self._global.factor is not None:
            trainer.accumulate_grad_batches = self._global.factor

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Add the batch to the window, and begin a window if none is open."""
        if self._global.needs_batches:
            self._global.see_batch(self._splitter.samples(batch), batch_idx, is_last=trainer.is_last_batch)
            trainer.accumulate_grad_batches = self._global.factor
        assert self.ctx is not None  # joined in setup
        before = self.ctx.window.before(batch_idx)
        if self._resumed is not None:
            self._resume_window(pl_module.device, before, trainer.accumulate_grad_batches)
        elif before == 0:
            self._begin_window(zeroed=True)
        elif not self._window and not self.ctx.window.held:
            warnings.warn(
                f"callback.micro_batching: the run resumes within a step, and the checkpoint lacks the first {before}"
                f" of its {trainer.accumulate_grad_batches} batches, so the step is taken without them; resume from a"
                " checkpoint at the end of a step to train on all batches",
                stacklevel=2,
            )
        self._window.append(Waiting(batch, batch_idx))

    def _resume_window(self, device: torch.device, before: int, factor: int) -> None:
        """Restore the batches that waited when the checkpoint was saved."""
        resumed, self._resumed = self._resumed, None
        if isinstance(resumed, str):
            raise CheckpointError(
                "callback.micro_batching: the checkpoint was saved within a step and lacks the batches that waited,"
                f" since checkpoints store tensors, lists and dicts, but not a {resumed}; resume from a checkpoint at"
                " the end of a step, or return dicts from the loader"
            )
        if len(resumed) != before:
            raise CheckpointError(
                f"callback.micro_batching: in the checkpoint {len(resumed)} batches of a step wait, but {before} are"
                f" expected with {factor} batches in a step; write callback.micro_batching.global_batch or"
                " accumulate_grad_batches as in the saved run"
            )
        self._window = [Waiting(moved(batch, device), batch_idx) for batch, batch_idx in resumed]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Begin a new window if this one has run."""
        if self._ran:
            self._begin_window(zeroed=False)

    # --- validation ---

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._validating = f"validation batch {batch_idx} of loader {dataloader_idx}"

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self._validating = ""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Add the validation batch that didn't fit to the text of its error."""
        super().on_exception(trainer, pl_module, exception)
        validating, self._validating = self._validating, ""
        if validating and is_out_of_memory(exception):
            exception.args = (
                f"{exception} (in {validating}: callback.micro_batching splits training batches only; use a smaller"
                " batch_size in val_dataloader)",
            )

    # --- the loss ---

    def loss(self, ctx: Run, proceed: Callable[..., Any]) -> Any:
        """Run all batches of a step together with its last one; earlier ones wait."""
        if self not in ctx.trainer.callbacks:  # `LearningRateFinder` drops them for its steps
            return proceed()
        if not ctx.window.is_last:
            ctx.window.waits = True
            return patches.empty_result(ctx.trainer, NoOutputs())
        if self._rollback is None:
            self._rollback = Rollback(ctx.module, ctx.device)
            frozen = {name: p for name, p in ctx.module.named_parameters() if not p.requires_grad}
            self._frozen = Unchanged(frozen)  # such as a moving average of the others
        if self._gradients is None:
            self._gradients, self._counted = WindowGradients(ctx.strategy.optimizers), ctx.window.held
        elif self._ran:  # an optimizer evaluates the step again
            self._gradients.restore()
        self._ran = True
        if not self._checked:
            self._checked = True
            self._splitter.require_parts(self._window[0].batch)
        result = self._run(ctx, proceed)
        ctx.window.held = self._counted + self._batches_counted(ctx)
        return result

    def _batches_counted(self, ctx: Run) -> int:
        """Return the number of batches that the window is counted as.

        This is the factor, even for a short window, so that no other code corrects its mean. If a checkpoint restored
        the gradient of some batches, it is the number of the remaining ones.
        """
        return len(self._window) if self._counted else ctx.window.factor

    def _run(self, ctx: Run, proceed: Callable[..., Any]) -> Any:
        """Run the window's batches in parts that fit, and return their common result."""
        batches = [waiting.batch for waiting in self._window]
        undo = self._save(ctx) if ctx.window.repeats else []
        while True:
            size = self._size.current
            if not self._embeddings:
                self._check_before(ctx, size)
            parts = self._splitter.micro_batches(batches, None if self._embeddings else size)
            agreed(len(parts), "the number of parts of a batch", "write DataLoader(drop_last=True)")
            for embedding in self._embeddings:
                embedding.size = size
            run = partial(self._forward_and_backward, ctx, proceed, parts)
            result, failure = attempt(run) if ctx.window.repeats else (run(), None)
            if failure is None:
                break
            for each in undo:
                each()
            if self._frozen is not None and (names := self._frozen.changed()):
                raise ConflictError(changes_in_place(names)) from None
            samples = max(map(self._samples_of, parts))
            self._shrink(ctx, min(samples, size or samples), failure)
        assert result is not None
        self._require_embeddings()
        logged, whole = result
        counted = sum(part.samples for part in parts) if len(batches) > 1 else None
        logged.replay(patches.logged(ctx.trainer), counted)
        if size is not None:
            largest = max(sum(self._samples_of(p) for p in parts if p.batch == index) for index in range(len(batches)))
            if (larger := self._size.fitted(largest)) is not None:
                self._report(ctx, f"micro_batching: {size} samples fitted, now trying {larger}")
        return whole

    def _check_before(self, ctx: Run, size: int | None) -> None:
        """Check the loss before the first batch that is split, or with ``auto`` before the first that may be.

        If all its rows have as many labels, a mean over tokens is one over samples too. Then it is checked once more,
        before the first batch whose rows differ among the first `LOOKED_AT`.
        """
        if not self.check or self._looked_at >= LOOKED_AT:
            return
        for waiting in self._window:
            samples = self._splitter.samples(waiting.batch)
            if samples > (size or 1):
                differs = tells_weights_apart(self._splitter, waiting.batch, samples)
                if differs or not self._looked_at:
                    require_mean(ctx, self._splitter, *waiting, samples=samples)
                self._looked_at = LOOKED_AT if differs else self._looked_at + 1
                return

    def _samples_of(self, part: MicroBatch) -> int:
        return part.samples or self._splitter.samples(part.data)

    def _require_embeddings(self) -> None:
        """Check that each part that was named to embed samples has run."""
        for embedding in self._embeddings:
            if not embedding.calls:
                raise ConflictError(
                    f"{embedding.option}: training_step never calls it, so the batch isn't split; write {EMBED}=<the"
                    " module or method that training_step calls for its embeddings>"
                )

    def _save(self, ctx: Run) -> list[Callable[[], None]]:
        """Save the current state, and return functions that restore it."""
        assert self._rollback is not None  # set in loss
        assert self._gradients is not None
        assert self._frozen is not None
        self._rollback.save()
        self._frozen.note()
        rewinds = [technique.rewind(ctx) for technique in ctx.having("rewind")]
        return [self._rollback.restore, *rewinds, self._gradients.restore]

    def _forward_and_backward(
        self, ctx: Run, proceed: Callable[..., Any], parts: Sequence[MicroBatch]
    ) -> tuple[Logged, Any]:
        logged, results = Logged(), []
        parts = [part for part in parts if part.share]
        weight = self._batches_counted(ctx) / ctx.window.weight
        with patches.logged_through(ctx.trainer, partial(self._log, logged)):
            for part, following in zip_longest(parts, parts[1:]):
                logged.share = part.share
                batch_idx = self._window[part.batch].batch_idx
                within = following is not None and following.batch == part.batch
                with patches.within_batch(ctx.strategy.precision_plugin) if within else nullcontext():
                    result = proceed(batch=part.data, batch_idx=batch_idx, weight=weight * part.share)
                result.closure_loss = None  # it has had its backward
                results.append(result)
        return logged, _whole(results, parts, ctx.window.factor if self.global_batch is not None else 1)

    def _log(self, logged: Logged, hook: str, name: str, value: Any, **options: Any) -> None:
        for embedding in self._embeddings:
            if embedding.is_split:
                raise ConflictError(
                    f"{embedding.option}: self.log({name!r}, ...) is called in it, for each micro-batch and again in"
                    " backward; call it in training_step, with what it returns"
                )
        logged.log(hook, name, value, **options)

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Save the gradients that are left after ``zero_grad``."""
        for embedding in self._embeddings:
            embedding.require_returned(loss)
        if self._gradients is not None:  # set in loss, except for the steps of `LearningRateFinder`
            self._gradients.save(zeroed=self._zeroed)
        return proceed(loss)

    def _shrink(self, ctx: Run, samples: int, failure: str) -> None:
        if samples == 1:
            raise BudgetError(
                f"callback.micro_batching.micro_batch=1: out of memory with a single sample ({failure}); use less"
                " memory per sample: solo=[checkpointing,micro_batching] or long_context for activations, compact or"
                " zero_offload for weights and states"
            )
        self.retries += 1
        self._size.failed(samples)
        self._report(
            ctx,
            f"micro_batching: out of memory with {samples} samples; the batch runs again with {self._size.current}"
            f" ({failure})",
        )

    def _report(self, ctx: Run, text: str) -> None:
        ctx.info(f"{text}, at optimizer step {ctx.trainer.global_step}")
        values = {"micro_batching/micro_batch": self._size.current, "micro_batching/retries": self.retries}
        patches.log_metrics(ctx.trainer, values)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the learned sizes, and the batches that wait for the last batch of their step."""
        state: dict[str, Any] = dict(self._size.state())
        waits = [] if self._ran else self._window
        if self.ctx is not None and (within := resuming.batch_within(self.ctx.trainer)) is not None:
            waits = [waiting for waiting in self._window if waiting.batch_idx != within]  # that one is loaded again
        if waits:
            unknown = next((type(waiting.batch) for waiting in waits if not is_plain(waiting.batch)), None)
            waiting = [(moved(batch, "cpu"), batch_idx) for batch, batch_idx in waits]
            state["waiting"] = waiting if unknown is None else unknown.__name__
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the saved run's sizes and waiting batches."""
        expected = self._size.state()
        sizes = {key: value for key, value in state_dict.items() if key != "waiting"}
        if set(sizes) != set(expected) or not all(value is None or type(value) is int for value in sizes.values()):
            raise CheckpointError(
                f"callback.micro_batching: the checkpoint's state has {', '.join(state_dict)}; expected are the"
                f" integers {', '.join(expected)}, and waiting batches"
            )
        self._size.load(sizes)
        self._resumed = state_dict.get("waiting")


def _whole(results: list[Any], parts: list[MicroBatch], factor: int) -> Any:
    """Return Lightning's result for all parts, with its loss multiplied by ``factor``."""
    whole = results[-1]
    if len(results) > 1 and (having := [pair for pair in zip(results, parts, strict=True) if pair[0].loss is not None]):
        whole = copy.copy(whole)
        shares = [part.share for _, part in having]
        whole.loss = weighted_mean([result.loss for result, _ in having], shares) * sum(shares)
        whole.extra = merged_outputs([result.extra for result, _ in having], shares, [p.samples for _, p in having])
    if whole.loss is not None and factor != 1:
        whole.loss = whole.loss * factor
    return whole
