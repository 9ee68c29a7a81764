"""A curriculum: easy items or short sequences first, then more and more of the rest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.data.curriculum_batches import CurriculumBatches, Pace
from lightning_solo.data.item_lengths import item_difficulties, item_lengths, name_of
from lightning_solo.data.loaders import processes_of, require_one_loader, require_own_batches, with_batches
from lightning_solo.data.loss_weights import IGNORED, labels_of
from lightning_solo.data.truncation import is_left_padded, sequences_of, truncated
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.curriculum.card import CARD, SEQUENCES, Settings
from lightning_solo.techniques.curriculum.item_losses import item_losses

LOOKED_AT = 10
"""First batches that are inspected on the device; one of them must be long enough to be cut."""


class Curriculum(Technique, Settings):
    """Begins training with the easiest items or with short sequences, and adds the rest until ``duration``.

    If ``by`` is a difficulty, the loader draws each batch from the easiest items, a share of all items that grows from
    ``start`` to 1. An epoch has as many batches as without a curriculum; until the share is 1, an item may come several
    times in an epoch, or never. If ``by`` is ``"sequence_length"``, the batches of any loader are cut on the device to
    a share of the longest sequence so far; shorter ones are unchanged.

    Draws depend only on the seed, the position in training and the difficulties, so a resumed run has the batches of
    an uninterrupted one, with any number of workers. Losses are measured at the start of training, and whenever
    Lightning reloads the loader (``reload_dataloaders_every_n_epochs``); checkpoints contain them.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._pace = Pace(self.start, self.duration, self.schedule)
        self._begin()

    def _begin(self) -> None:
        """Reset the state of a run."""
        self._tokens = self._longest = 0  # of the batches so far
        self._held = (-1, 0)  # an optimizer step, and the tokens before its first batch
        self._batches: CurriculumBatches | None = None
        self._losses: Tensor | None = None
        self._begun = (0, 0)  # the epoch and position from which the current losses hold
        self._resumed = False  # whether the losses are those of a checkpoint
        self._forget()

    def _forget(self) -> None:
        """Reset the state of a fit."""
        self._loader: Any = None  # the loader with items that aren't ranked yet
        self._value: float | None = None  # the last logged share
        self._came = 0  # training batches of this fit
        self._warned = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin a run, unless the Trainer continues one."""
        joins = stage == "fit" and self.ctx is None
        if joins and self.by != SEQUENCES and self.pace == "steps":
            refuse_callbacks(
                "callback.curriculum.pace=steps, which draws items ahead,",
                frozenset({"accumulation_factor"}),
                trainer.callbacks,
                "write callback.curriculum.pace=tokens, or callback.curriculum.by=sequence_length, or"
                " ~callback.curriculum and accumulate_grad_batches=<N>",
            )
        super().setup(trainer, pl_module, stage)
        if joins and self.ctx is not None:
            if trainer.global_step == 0:
                self._begin()
            self._forget()
            self.ctx.undo.callback(self._forget)
            if self.by == SEQUENCES:
                self.ctx.undo.enter_context(patches.batches_through(trainer.strategy, self._cutting))

    # --- items by their difficulty ---

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return the loader with other batches; the items are ranked when the first one is drawn."""
        if self.by == SEQUENCES:
            return loader
        require_own_batches(loader, "callback.curriculum")
        epoch = _epoch(ctx.trainer)
        if self._batches is not None and self._loader is None:  # the batches have been used
            epoch = self._batches.own(epoch)
            self._begun = epoch, self._batches.position(epoch)
        rank, processes = processes_of(loader)
        batches = CurriculumBatches(
            torch.zeros(len(loader.dataset)),
            loader.batch_size,
            self._pace,
            loader.drop_last,
            self.seed,
            batches_per_step=ctx.trainer.accumulate_grad_batches,
            begun=self._begun,
            before=self._rank,
            rank=rank,
            processes=processes,
        )
        batches.set_epoch(epoch)
        self._loader, self._batches = loader, batches
        return with_batches(loader, batches)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Log the cuts, and warn if the curriculum ends after training."""
        if self.by == SEQUENCES and self.ctx is not None:
            self.ctx.info(
                f"curriculum: sequences are cut, at first to {self.start:.0%} of the longest so far; they are whole"
                f" after {self.duration:,} {self.pace}"
            )
        steps = trainer.max_steps
        if steps == -1 and trainer.max_epochs != -1 and math.isfinite(trainer.num_training_batches):
            steps = trainer.max_epochs * -(-trainer.num_training_batches // trainer.accumulate_grad_batches)
        if self.pace == "steps" and -1 < steps < self.duration and pl_module.automatic_optimization:
            warnings.warn(
                f"callback.curriculum.duration={self.duration:,}: training ends after {steps:,} steps, so the"
                f" {'ends of the longest sequences' if self.by == SEQUENCES else 'most difficult items'} are never"
                " trained on; write a smaller duration",
                stacklevel=2,
            )

    def _rank(self) -> None:
        """Rank the items by difficulty, before the first batch is drawn."""
        loader, self._loader = self._loader, None
        if loader is None:
            return
        ctx, batches = self.ctx, self._batches
        assert ctx is not None  # in a fit
        assert batches is not None  # set with the loader
        require_one_loader(
            ctx.trainer.train_dataloader, "callback.curriculum", "write callback.curriculum.by=sequence_length"
        )

        def report(done: int, count: int) -> None:
            ctx.info(f"curriculum: read {done:,} of {count:,} items")

        dataset, collate_fn = loader.dataset, loader.collate_fn
        of: Any = "auto" if self.by == "length" else self.by
        with isolate_rng():  # items may be augmented at random
            if self.pace == "tokens":
                tokens: Any = "collated" if of == "collated" else "auto"
                batches.tokens = item_lengths(dataset, tokens, collate_fn, report, "callback.curriculum.by")
            if self.by == "loss":
                difficulty = self._ranked_losses(ctx, loader, batches, report)
            else:
                difficulty = item_difficulties(dataset, of, collate_fn, report, "callback.curriculum.by")
        difficulty, batches.tokens = ctx.strategy.broadcast((difficulty, batches.tokens))
        if len(difficulty) <= batches.batch_size:
            raise NothingToDoError(
                f"callback.curriculum: all {len(difficulty)} items of {type(dataset).__name__} fit into each batch of"
                f" {batches.batch_size}; write a smaller batch_size, or ~callback.curriculum"
            )
        low, high = float(difficulty.min()), float(difficulty.max())
        if low == high:
            raise NothingToDoError(
                f"callback.curriculum.by={name_of(self.by)}: all {len(difficulty):,} items of {type(dataset).__name__}"
                f" are equally difficult ({low:g}); write another by, such as callback.curriculum.by=sequence_length to"
                " cut them, or ~callback.curriculum"
            )
        batches.order_by(difficulty)
        first = max(batches.batch_size, round(self.start * len(difficulty)))
        ctx.info(
            f"curriculum: {len(difficulty):,} items by {name_of(self.by)}, from {low:g} to {high:g}; training begins"
            f" with the easiest {first:,} and has all of them after {self.duration:,} {self.pace}"
        )

    def _ranked_losses(self, ctx: Run, loader: Any, batches: CurriculumBatches, report: Any) -> Tensor:
        """Return the items' losses, from the checkpoint unless the loader has been reloaded."""
        if self._resumed:
            assert self._losses is not None  # of the checkpoint
            self._resumed = False
            if len(self._losses) != len(loader.dataset):
                raise CheckpointError(
                    f"callback.curriculum.by=loss: the checkpoint has the losses of {len(self._losses):,} items, but"
                    f" the data set has {len(loader.dataset):,} items; resume with the same data set"
                )
            batches.order_by(self._losses)
            every, epoch = ctx.trainer.reload_dataloaders_every_n_epochs, batches.own(_epoch(ctx.trainer))
            if not every or epoch - self._begun[0] < every:
                return self._losses
            batches.begun = self._begun = epoch, batches.position(epoch)
        self._losses = ctx.strategy.broadcast(item_losses(ctx, loader, report))
        return self._losses

    # --- sequences ---

    def _cutting(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that moves a batch to the device by ``move``, then cuts it."""
        return lambda *args, **kwargs: self._cut(move(*args, **kwargs))

    def _cut(self, batch: Any) -> Any:
        """Return a batch for training with shorter sequences."""
        assert self.ctx is not None  # undone with the fit
        trainer = self.ctx.trainer
        if not trainer.training:
            return batch
        try:
            rows, length = sequences_of(batch)
        except ConflictError as error:
            raise ConflictError(f"callback.curriculum.by=sequence_length: {error}, or write another by") from error
        self._longest = max(self._longest, length)
        step = trainer.global_step
        if step != self._held[0] or not self.ctx.module.automatic_optimization:  # manual steps may not be counted
            self._held = step, self._tokens
        position = self._held[1] if self.pace == "tokens" else step
        kept = kept_length(self._pace.share(position), self._longest, self.multiple)
        self._came += 1
        if self._came >= min(LOOKED_AT, trainer.num_training_batches):
            self._require_cuts()
        self._note("sequence_length", min(length, kept))
        self._tokens += rows * min(length, kept)
        if kept >= length:
            return batch
        cut = truncated(batch, length, kept)
        if self._came <= LOOKED_AT:  # only the first ones, since a GPU waits for each look
            self._look(batch, cut)
        return cut

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Refuse sequences that are too short to be cut, also if training ended after few batches."""
        if self._came:
            self._require_cuts()

    def _require_cuts(self) -> None:
        if kept_length(self.start, self._longest, self.multiple) == self._longest:
            raise NothingToDoError(
                f"callback.curriculum.start={self.start} and multiple={self.multiple}: sequences of at most"
                f" {self._longest} places are too short to be cut; write a smaller start or multiple, or"
                " ~callback.curriculum"
            )

    def _look(self, batch: Any, cut: Any) -> None:
        """Warn once if the cut removed all labels of a batch."""
        if is_left_padded(batch):
            raise ConflictError(
                "callback.curriculum.by=sequence_length: attention_mask begins with 0, so sequences are padded on the"
                " left, and their tokens would be cut; pad on the right (a tokenizer's padding_side='right'), or write"
                " another by"
            )
        labels, left = labels_of(batch), labels_of(cut)
        if self._warned or labels is None or left is None:
            return
        if labels.ne(IGNORED).any() and not left.ne(IGNORED).any():
            self._warned = True
            warnings.warn(
                f"callback.curriculum.start={self.start}: all labels of a batch that was cut to {left.shape[-1]} of"
                f" {labels.shape[-1]} places are {IGNORED}, so its mean loss is nan; write a larger start, or another"
                " by",
                stacklevel=2,
            )

    # --- logging and checkpoints ---

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Log the share of the items."""
        if self._batches is not None and batch_idx < len(self._batches.shares):
            self._note("share", round(self._batches.shares[batch_idx], 2))

    def _note(self, what: str, value: float) -> None:
        """Log a value if it has changed."""
        if value != self._value and self.ctx is not None:
            self._value = value
            patches.log_metrics(self.ctx.trainer, {f"curriculum/{what}": value})

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next batches."""
        if self.by == SEQUENCES:
            return {"tokens": self._tokens, "longest": self._longest, "held": self._held}
        return {"begun": self._begun, "losses": self._losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved run's position."""
        if set(state_dict) != set(self.state_dict()) or (self.by == "loss") != (state_dict.get("losses") is not None):
            raise CheckpointError(
                f"callback.curriculum.by={name_of(self.by)} needs a state with {sorted(self.state_dict())}, and the"
                f" checkpoint's has {sorted(state_dict)}: resume with the by of the saved run"
            )
        self._begin()
        if self.by == SEQUENCES:
            self._tokens, self._longest = state_dict["tokens"], state_dict["longest"]
            step, position = state_dict["held"]
            self._held = step, position
            return
        epoch, position = state_dict["begun"]
        self._begun, self._losses, self._resumed = (epoch, position), state_dict["losses"], True


def kept_length(share: float, longest: int, multiple: int) -> int:
    """Return the length to cut to: at least a share of the longest, and less than it by a multiple of ``multiple``.

    So the length suits kernels as well as the longest one does: 128, or 129 for a module that shifts by one.

    >>> [kept_length(share, 129, 8) for share in (0.01, 0.5, 0.6, 1.0)]
    [9, 65, 81, 129]
    """
    most = max(0, longest - multiple) // multiple
    return longest - multiple * min(most, math.floor((1 - share) * longest / multiple))


def _epoch(trainer: Any) -> int:
    """Return the epoch that Lightning passes to samplers; ``current_epoch`` is one less in a resumed run."""
    epoch: int = trainer.fit_loop.epoch_progress.current.processed
    return epoch
