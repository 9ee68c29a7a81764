"""Packing: several documents share a row, which has little padding, and don't see one another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_solo.attributes import replaced
from lightning_solo.data.item_lengths import name_of, range_of
from lightning_solo.data.length_batches import padding_share
from lightning_solo.data.loaders import plain_batches, require_one_loader, require_own_batches
from lightning_solo.data.packing import TwoDocuments, packed_loader, packed_padding, two_documents
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.nn.document_boundaries import BoundaryError, caching_configs, require_boundaries
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.packing.card import CARD, Settings


class Packing(Technique, Settings):
    """Makes the training loader fill each row with several documents, different ones in each epoch.

    Batches have ``input_ids``, ``labels`` and ``position_ids``, which restart with every document; the module passes
    all of them to its model. In the first batch `training_step` runs for two documents, to check that the loss of one
    doesn't depend on the other. Hugging Face's models create no cache in a training step, since with one they don't
    look for documents. A run resumed within an epoch continues with exactly the remaining batches.

    Attributes:
        padding_before: Share of padding in the loader's own batches.
        padding_after: Share of padding in packed ones.

    Raises:
        PresetError: An argument is ill-formed.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self.padding_before: float | None = None
        self.padding_after: float | None = None
        self._configs: list[Any] = []  # of models that would create caches
        self._documents: TwoDocuments | None = None  # still to be compared

    def transform(self, ctx: Run) -> None:
        """Find the configurations that create caches.

        Raises:
            ConflictError: a ``training_step`` that can't be run for two documents: manual optimization, or one that
                takes the loader's iterator.
        """
        name = type(ctx.module).__name__
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"packing and {name}.automatic_optimization=False: whether documents see one another is tried by"
                " training_step, which would step; write automatic_optimization=True, or pack in train_dataloader by"
                " lightning_solo.data.packing.packed_loader and drop packing"
            )
        if "dataloader_iter" in inspect.signature(ctx.module.training_step).parameters:
            raise ConflictError(
                f"packing and {name}.training_step(dataloader_iter), which takes its batches itself; write"
                " training_step(batch, batch_idx), or drop packing"
            )
        self._configs = caching_configs(ctx.module)

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return the loader with packed batches.

        Raises:
            ConflictError: it makes no batches itself, the lengths can't be read, or its collate function makes no
                documents.
            NothingToDoError: rows have a single document each, or there is no padding.
        """
        require_own_batches(loader, CARD.name)

        def report(done: int, count: int) -> None:
            ctx.info(f"packing: read the lengths of {done:,} of {count:,} documents")

        with isolate_rng():  # documents may be augmented at random
            packed = packed_loader(loader, self.capacity, self.rows, self.length, self.seed, report)
            batches = packed.batch_sampler
            first = batches.batches(batches.epoch)
            rows = [row for batch in first for row in batch]
            lengths = torch.tensor(batches.lengths)
            before = padding_share(lengths, plain_batches(loader, len(lengths), self.seed))
            after = packed_padding(batches.lengths, first)
            if max(map(len, rows), default=0) < 2 or (self.capacity is None and before <= after):
                raise NothingToDoError(
                    f"packing: {len(lengths)} documents of {range_of(lengths)} tokens, by"
                    f" length={name_of(self.length)}, in {len(rows)} rows of capacity={batches.capacity}, and"
                    f" {before:.1%} of plain batches of {loader.batch_size} are padding: nothing is saved; write a"
                    " larger capacity, length=<a column> where this isn't their length, or drop packing"
                )
            self._documents = two_documents(packed)
        self.padding_before, self.padding_after = before, after
        ctx.info(
            f"packing: {len(lengths):,} documents of {range_of(lengths)} tokens in {len(rows):,} rows of at most"
            f" {batches.capacity}, {batches.rows} of them a batch; of the tokens {after:.1%} are padding, in plain"
            f" batches {before:.1%}"
        )
        return packed

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that there is one loader, which isn't known earlier.

        Raises:
            ConflictError: there are several, or a collection.
        """
        require_one_loader(trainer.train_dataloader, CARD.name, "drop packing")

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step without caches; before the first step run the comparison."""
        with ExitStack() as stack:
            for config in self._configs:
                stack.enter_context(replaced(config, "use_cache", False))
            if self._documents is not None:
                documents, self._documents = self._documents, None
                rounding = 1e-3 if ctx.precision in ("32-true", "64-true") else 2e-2
                with patches.logged_through(ctx.trainer, lambda *_, **__: None):
                    try:
                        require_boundaries(ctx.module, partial(_loss, ctx, args[1:], kwargs), documents, rounding)
                    except BoundaryError as error:
                        raise ConflictError(f"packing and {error}, by length_bucketing") from error
                ctx.info("packing: in a row of two documents the loss of the second is its own")
            return proceed(*args, **kwargs)


def _loss(ctx: Run, args: Any, kwargs: Any, packed: dict[str, Tensor]) -> Tensor:
    """Return the loss of ``training_step`` for a batch, without the other techniques around it."""
    batch = patches.on_device(ctx.trainer, {key: tensor.clone() for key, tensor in packed.items()})
    name = type(ctx.module).__name__
    try:
        output = type(ctx.strategy).training_step(ctx.strategy, batch, *args, **kwargs)  # its own, without seams
    except (TypeError, LookupError, AttributeError) as error:
        if not any(key in str(error) for key in (*packed, "attention_mask")):
            raise
        raise ConflictError(
            f"packing and {name}.training_step, which raised {type(error).__name__}: {error}; a batch is a dict of"
            f" {', '.join(packed)}, without an attention mask, and a model that takes no position_ids can't keep"
            " documents apart: use batches of similar length, by length_bucketing"
        ) from error
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        raise ConflictError(
            f"packing and {name}.training_step, which returned no loss for two documents: whether they see one another"
            " can't be checked; return a loss for every batch, or drop packing"
        )
    return loss  # type: ignore[no-any-return]
