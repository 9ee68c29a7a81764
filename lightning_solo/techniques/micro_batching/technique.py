"""Micro-batching: the batch goes through the model in parts that fit, and is run again when it runs out of memory."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_solo.cards.card import resources
from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.data.batch_weights import weight_of
from lightning_solo.data.micro_batch_size import MicroBatchSize
from lightning_solo.data.splitting import samples_of, split_evenly
from lightning_solo.errors import BudgetError, CheckpointError, ConflictError
from lightning_solo.memory.attempts import attempt
from lightning_solo.nn.rollback import Rollback
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.micro_batching.card import CARD
from lightning_solo.techniques.micro_batching.logged import Logged, merged_outputs, weighted_mean

CHECKED_SAMPLES = 4


class Part(NamedTuple):
    """A micro-batch: what runs it, its data and samples, and its share in the loss of the step."""

    proceed: Callable[..., Any]
    batch: Any
    samples: int
    share: float


class MicroBatching(Technique):
    """Runs each batch in micro-batches that fit on the device, with gradient and logged loss of the whole batch.

    After an out-of-memory error in forward or backward nothing of the attempt is kept, random numbers, buffers,
    metrics and gradients are put back, and the same batches are run again in smaller parts. What fits is in
    checkpoints, and after a while something larger is tried.

    Where several batches of the loader make a step, they wait until the last one has come, and are run together: only
    then is it known by what each token counts.

    Args:
        micro_batch: Samples in a micro-batch at most; "auto" begins with the whole batch.
        global_batch: Samples in an optimizer step, a multiple of the loader's batch; None for one batch of the loader,
            or as many as accumulation says.
        batch_dim: The batch dimension of all tensors, or by their paths; None for a tensor that all samples share.
        split: Function of (batch, size) that returns the parts of a batch, each with its number of samples, at most
            ``size``; for batches that are no nesting of tensors with a batch dimension.
        weight_by: "samples", "tokens", "shifted_tokens" or a key of the batch; see `lightning_solo.data.batch_weights`.
        batch_norm: "ghost" allows layers whose statistics would be those of a micro-batch.
        check: Compare loss and gradients of a few samples, together and in parts, in the first batch.

    Attributes:
        retries: How often batches were run again in this fit.

    Raises:
        PresetError: An argument is ill-formed.
    """

    phase = CARD.phase

    def __init__(
        self,
        micro_batch: int | Literal["auto"] = "auto",
        global_batch: int | None = None,
        batch_dim: int | Mapping[str, int | None] = 0,
        split: Callable[..., Any] | None = None,
        weight_by: str = "samples",
        batch_norm: str = "refuse",
        check: bool = False,
    ) -> None:
        self._settings = CARD.check_call(locals())
        self.micro_batch: int | Literal["auto"] = micro_batch
        self.global_batch = global_batch
        self.batch_dim = dict(batch_dim) if isinstance(batch_dim, Mapping) else batch_dim
        self.split = split
        self.weight_by = weight_by
        self.batch_norm = batch_norm
        self.check = check
        self.retries = 0
        self._size = MicroBatchSize(None if micro_batch == "auto" else int(micro_batch))
        self._forget()

    def __repr__(self) -> str:
        return CARD.repr(self)

    @property
    def fits(self) -> int | None:
        """Samples in a micro-batch at present, at most; None for the whole batch."""
        return self._size.now

    def _forget(self) -> None:
        """Drop what belongs to a fit."""
        self._factor: int | None = None
        self._first_samples = 0  # of the first batch, where the loader doesn't say
        self._rollback: Rollback | None = None
        self._checked = False
        self._begin_window()

    def _begin_window(self) -> None:
        self._batch: Any = None
        self._window: list[tuple[Callable[..., Any], Any]] = []
        self._ran = self._is_added = False
        self._zeros: list[Tensor] | None = None  # gradients of zero that the window begins with; None before backward

    # --- a fit ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what else decides when to step, and have the Trainer count steps."""
        joins = stage == "fit" and self.ctx is None
        if joins and self.global_batch is not None:
            refuse_callbacks("MicroBatching", resources(CARD.owns, self._settings), trainer.callbacks)
            if trainer.accumulate_grad_batches != 1:
                raise ConflictError(
                    f"MicroBatching(global_batch={self.global_batch}) and accumulate_grad_batches="
                    f"{trainer.accumulate_grad_batches}: both say how many batches make a step; drop one of them"
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
            ctx.undo.enter_context(patches.stepping_batches(trainer, self._count_steps))

    def transform(self, ctx: Run) -> None:
        """Refuse loops whose forward and backward aren't Lightning's.

        Raises:
            ConflictError: manual optimization, a strategy that accumulates by itself, a ``training_step`` that takes
                the loader's iterator.
        """
        name = type(ctx.module).__name__
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"micro_batching and {name}.automatic_optimization=False: forward and backward are the module's own;"
                " write automatic_optimization=True, or split the batch in training_step and drop micro_batching"
            )
        if ctx.strategy.handles_gradient_accumulation:
            raise ConflictError(
                f"micro_batching and {type(ctx.strategy).__name__}, which accumulates by itself; write"
                " strategy='auto', or drop micro_batching"
            )
        if "dataloader_iter" in inspect.signature(ctx.module.training_step).parameters:
            raise ConflictError(
                f"micro_batching and {name}.training_step(dataloader_iter), which takes its batches itself; write"
                " training_step(batch, batch_idx), or drop micro_batching"
            )

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Learn from the loader how many of its batches make a step."""
        samples = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        if self.global_batch is not None and isinstance(samples, int):
            self._factor = _factor(self.global_batch, samples)
        return loader

    def _count_steps(self, trainer: Any, stock: int | float) -> int | float:
        batches = trainer.num_training_batches
        if self._factor is None or trainer.max_epochs == -1 or batches == math.inf:
            return stock
        steps = -(-int(batches) // self._factor) * max(int(trainer.max_epochs), 1)
        return steps if trainer.max_steps == -1 else min(steps, int(trainer.max_steps))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse layers that depend on the batch as a whole.

        Raises:
            ConflictError: names the BatchNorm layers that would see micro-batches.
        """
        layers = [
            name
            for name, part in pl_module.named_modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
        ]
        if layers and self.batch_norm == "refuse":
            raise ConflictError(
                f"micro_batching and BatchNorm ({', '.join(layers)}), whose statistics would be those of micro-batches;"
                " write batch_norm=ghost if that is wanted, replace the layers by GroupNorm, or put them into eval mode"
            )
        if self._factor is not None:
            trainer.accumulate_grad_batches = self._factor

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take the batch, and where a window opens begin it."""
        if self.global_batch is not None and self._factor is None:  # the loader didn't say
            self._first_samples = self._samples(batch)
            self._factor = _factor(self.global_batch, self._first_samples)
            trainer.accumulate_grad_batches = self._factor
        elif self._first_samples and not trainer.is_last_batch and self._samples(batch) != self._first_samples:
            raise ConflictError(
                f"micro_batching: global_batch={self.global_batch} needs batches of one size, and batch {batch_idx} has"
                f" {self._samples(batch)} samples where the first had {self._first_samples}; write global_batch=null,"
                " and how many batches make a step by accumulate_grad_batches"
            )
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._begin_window()
        self._batch, self._is_added = batch, False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let go of the batches that have been run."""
        self._batch = None
        if self._ran:
            self._begin_window()

    # --- a step ---

    def loss(self, ctx: Run, proceed: Callable[..., Any]) -> Any:
        """Keep a batch until the last one of the step has come, and run them."""
        if not self._is_added:
            self._window.append((proceed, self._batch))
            self._is_added = True
        if not ctx.window.is_last:
            return patches.empty_result(ctx.trainer)
        if self._rollback is None:
            self._rollback = Rollback(ctx.module, ctx.device)
        if self._ran:  # an optimizer evaluates the step again
            self._zero_gradients(ctx)
        self._ran = True
        if self.check and not self._checked:
            self._checked = True
            self._compare(ctx)
        result, most = self._run(ctx)
        before = self._size.now
        if (larger := self._size.fitted(most)) is not None:
            self._report(ctx, f"micro_batching: {before} samples fitted, {larger} are tried")
        ctx.window.held = ctx.window.factor  # each counts by its share: nobody has to correct a short window
        return result

    def _run(self, ctx: Run) -> tuple[Any, int]:
        """Return the result of the window's batches, in parts that fit, and the samples of the largest batch."""
        assert self._rollback is not None  # made before
        rewinds = [technique.rewind(ctx) for technique in ctx.having("rewind")]
        if ctx.window.repeats:
            self._rollback.save()
        while True:
            parts, most = self._parts()
            run = partial(self._forward_and_backward, ctx, parts)
            result, failure = attempt(run) if ctx.window.repeats else (run(), None)
            if failure is None:
                assert result is not None
                logged, whole = result
                samples = sum(part.samples for part in parts) if len(self._window) > 1 else None
                logged.replay(ctx.trainer.fit_loop.epoch_loop._results.log, samples)
                return whole, most
            self._rollback.restore()
            for rewind in rewinds:
                rewind()
            if self._zeros is not None:
                self._zero_gradients(ctx)
            self._shrink(ctx, max(part.samples for part in parts), failure)

    def _forward_and_backward(self, ctx: Run, parts: list[Part]) -> tuple[Logged, Any]:
        logged, results = Logged(), []
        factor = ctx.window.factor
        with patches.logged_through(ctx.trainer, logged.log):
            for part in parts:
                logged.share = part.share
                result = part.proceed(batch=part.batch, weight=factor * part.share / ctx.window.weight)
                result.closure_loss = None  # it has had its backward
                results.append(result)
        return logged, self._whole(results, parts, factor if self.global_batch is not None else 1)

    @staticmethod
    def _whole(results: list[Any], parts: list[Part], factor: int) -> Any:
        """Return Lightning's result for all parts; where the factor is ours, the loss isn't divided by it."""
        whole = copy.copy(results[-1])
        having = [(result, part) for result, part in zip(results, parts, strict=True) if result.loss is not None]
        if having:
            losses = [result.loss for result, _ in having]
            shares = [part.share for _, part in having]
            whole.loss = losses[0] if len(losses) == 1 else weighted_mean(losses, shares) * sum(shares)
            whole.loss = whole.loss if factor == 1 else whole.loss * factor
            whole.extra = merged_outputs([result.extra for result, _ in having], shares, [p.samples for _, p in having])
        return whole

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Note, behind the zeroing of gradients, what it left."""
        if self._zeros is None:
            self._zeros = [p for p in _trained(ctx) if p.grad is not None]
        return proceed(loss)

    def _zero_gradients(self, ctx: Run) -> None:
        """Put gradients back to where the window began, also those that a technique keeps elsewhere."""
        for optimizer in ctx.strategy.optimizers:
            optimizer.zero_grad()
        for p in _trained(ctx):
            p.grad = None
        for p in self._zeros or ():
            p.grad = torch.zeros_like(p)

    def _samples(self, batch: Any) -> int:
        if self.split is None:
            return samples_of(batch, self.batch_dim)
        return sum(samples for _, samples in self._split(batch, 2**62))

    def _parts(self) -> tuple[list[Part], int]:
        """Return the window's batches in parts, and the samples of the largest batch."""
        pieces: list[tuple[Callable[..., Any], Any, int]] = []
        most = 1
        for proceed, batch in self._window:
            samples = self._samples(batch)
            most = max(most, samples)
            parts = self._split(batch, self._size.of(samples))
            if (count := sum(number for _, number in parts)) != samples:
                raise ConflictError(
                    f"micro_batching: split returned {count} samples in {len(parts)} parts of a batch of {samples};"
                    " return all of them, whatever the size"
                )
            pieces += [(proceed, *part) for part in parts]
        return self._shared(pieces), most

    def _split(self, batch: Any, size: int) -> list[tuple[Any, int]]:
        """Return a batch in parts of at most so many samples, each with its samples."""
        if self.split is None:
            return split_evenly(batch, size, self.batch_dim)
        parts: list[tuple[Any, int]] = self.split(batch, size)
        if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int) for pair in parts):
            raise ConflictError("micro_batching: split must return a list of pairs (part, its samples, an integer)")
        largest = max((count for _, count in parts), default=0)
        if not 0 < largest <= size:
            raise ConflictError(
                f"micro_batching: split(batch, {size}) returned {len(parts)} parts, the largest of {largest} samples;"
                " return a list of (part, its samples) with at most as many"
            )
        return parts

    def _shared(self, pieces: list[tuple[Callable[..., Any], Any, int]]) -> list[Part]:
        """Return the parts that have a share in the loss."""
        if len(pieces) == 1:
            return [Part(*pieces[0], 1.0)]
        weights = [weight_of(part, count, self.weight_by) for _, part, count in pieces]
        if not sum(weights):  # no valid token at all: as without parts the loss is what the module makes of it
            weights = [float(count) for _, _, count in pieces]
        total = sum(weights)
        # an empty part's loss is a mean over nothing, NaN, whatever it is multiplied by
        return [Part(*piece, weight / total) for piece, weight in zip(pieces, weights, strict=True) if weight]

    def _shrink(self, ctx: Run, samples: int, failure: str) -> None:
        if samples == 1:
            raise BudgetError(
                f"micro_batching: out of memory with a single sample, micro_batch=1 ({failure}); what fits it is less"
                " memory per sample: solo=[checkpointing,micro_batching], or long_context, for activations; compact or"
                " zero_offload for weights and states"
            )
        self.retries += 1
        self._size.failed(samples)
        self._report(
            ctx,
            f"micro_batching: out of memory with {samples} samples; the batch is run again with {self._size.now}"
            f" ({failure})",
        )

    def _report(self, ctx: Run, text: str) -> None:
        ctx.info(f"{text}, at optimizer step {ctx.trainer.global_step}")
        values = {"micro_batching/micro_batch": self._size.now, "micro_batching/retries": self.retries}
        for logger in ctx.trainer.loggers:
            # the axis that self.log() uses
            logger.log_metrics(values, step=ctx.trainer.fit_loop.epoch_loop._batches_that_stepped)

    # --- the check of the first batch ---

    def _compare(self, ctx: Run) -> None:
        """Run a few samples of the first batch together and in parts, and compare what they give.

        Raises:
            ConflictError: loss or gradients differ, or the engine can't take gradients back.
        """
        assert self._rollback is not None  # made before
        if not ctx.window.repeats:
            raise ConflictError(
                f"micro_batching.check and {type(ctx.strategy).__name__}, whose gradients can't be taken back; write"
                " check=false"
            )
        proceed, batch = self._window[0]
        few = min(self._samples(batch), CHECKED_SAMPLES)
        if few < 2:
            return
        some, few = self._split(batch, few)[0]
        rewinds = [technique.rewind(ctx) for technique in ctx.having("rewind")]
        self._rollback.save()
        losses, gradients = [], []
        with _without_dropout(ctx.module):
            for size in (few, -(-few // 2)):
                pieces = [(proceed, part, count) for part, count in self._split(some, size)]
                _, whole = self._forward_and_backward(ctx, self._shared(pieces))
                if whole.loss is None:  # this batch is skipped
                    return
                losses.append(float(whole.loss))
                gradients.append([p.grad.detach().double().flatten() for p in _trained(ctx) if p.grad is not None])
                self._zero_gradients(ctx)
                self._rollback.restore()
                for rewind in rewinds:
                    rewind()
        together, apart = [torch.cat([*each, torch.zeros(1, dtype=torch.float64)]) for each in _on_host(gradients)]
        error = max(
            abs(losses[0] - losses[1]) / (abs(losses[0]) or 1.0),
            float((together - apart).norm() / (together.norm() or 1.0)) if together.shape == apart.shape else math.inf,
        )
        if not error <= (1e-8 if ctx.precision == "64-true" else 1e-3 if ctx.precision == "32-true" else 0.1):
            raise ConflictError(
                f"micro_batching.check: {few} samples together have a loss of {losses[0]:.6g}, in parts of"
                f" {-(-few // 2)} {losses[1]:.6g}, and what they give differs by {error:.2g} of it: the loss is no mean"
                f" by weight_by={self.weight_by}; write weight_by=tokens or shifted_tokens where it is one over tokens,"
                " return a mean where it is a sum, or drop micro_batching where it compares samples with one another"
            )

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of sizes that fit."""
        return dict(self._size.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin with what fitted the run that was saved.

        Raises:
            CheckpointError: a key is missing or unknown, or a value is no integer.
        """
        expected = self._size.state()
        plain = all(value is None or type(value) is int for value in state_dict.values())
        if set(state_dict) != set(expected) or not plain:
            raise CheckpointError(
                f"the checkpoint's state of MicroBatching is {state_dict}; it holds exactly the integers"
                f" {', '.join(expected)}"
            )
        self._size.load(state_dict)


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Have no dropout, whose draws differ between a batch and its parts, and no statistics of BatchNorm."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    layers = [part for part in module.modules() if isinstance(part, kinds) and part.training]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()


def _on_host(gradients: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[gradient.cpu() for gradient in each] for each in gradients]


def _trained(ctx: Run) -> list[Tensor]:
    return [p for optimizer in ctx.strategy.optimizers for p in parameters_of(optimizer)]


def _factor(global_batch: int, samples: int) -> int:
    """Return how many batches of so many samples make a step.

    Raises:
        ConflictError: none do, exactly; names sizes that would.
    """
    factor, rest = divmod(global_batch, samples)
    if rest or not factor:
        lower = f"{factor * samples} or " if factor else ""
        raise ConflictError(
            f"micro_batching: global_batch={global_batch} is no multiple of the loader's batch of {samples}; write"
            f" global_batch={lower}{(factor + 1) * samples}, or a batch_size that divides {global_batch}"
        )
    return factor
