"""Packing: several documents share a row, which has little padding, and don't see one another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_solo.attributes import replaced
from lightning_solo.data.item_lengths import name_of, range_of
from lightning_solo.data.length_batches import padding_share
from lightning_solo.data.loaders import plain_batches, require_one_loader, require_own_batches
from lightning_solo.data.packing import TwoDocuments, packed_loader, two_documents
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.nn.document_boundaries import BoundaryError, caching_configs, require_boundaries
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.packing.card import CARD, Settings


class Packing(Technique, Settings):
    """Makes the training loader fill each row with several documents, different ones in each epoch.

    Batches have ``input_ids``, ``labels`` and ``position_ids``, which restart with every document; the module passes
    all of them to its model. Before the first step ``training_step`` runs for two documents, to check that the loss of
    one doesn't depend on the other. Hugging Face's models create no cache in a training step, since with a cache they
    don't look for documents. A run resumed within an epoch continues with exactly the remaining batches.

    Attributes:
        padding_before: Share of padding in the loader's own batches.
        padding_after: Share of padding in packed batches.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self.padding_before: float | None = None
        self.padding_after: float | None = None
        self._configs: list[Any] = []  # of models that would create caches
        self._documents: TwoDocuments | None = None  # still to be compared

    def transform(self, ctx: Run) -> None:
        """Find the models' configurations that create caches."""
        name = type(ctx.module).__name__
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"callback.packing and {name}.automatic_optimization=False: the check that documents don't see one"
                " another runs training_step, which would step; write automatic_optimization=True, or"
                " ~callback.packing and pack in train_dataloader by lightning_solo.data.packing.packed_loader"
            )
        if "dataloader_iter" in inspect.signature(ctx.module.training_step).parameters:
            raise ConflictError(
                f"callback.packing and {name}.training_step(dataloader_iter), which takes its batches itself; write"
                " training_step(batch, batch_idx), or ~callback.packing"
            )
        self._configs = caching_configs(ctx.module)

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return the loader with packed batches."""
        require_own_batches(loader, "callback.packing")

        def report(done: int, count: int) -> None:
            ctx.info(f"packing: read the lengths of {done:,} of {count:,} documents")

        with isolate_rng():  # documents may be augmented at random
            packed = packed_loader(
                loader, self.capacity, self.rows, self.length, self.seed, report, ctx.strategy.broadcast
            )
            batches = packed.batch_sampler
            first = batches.batches(batches.epoch)
            rows = [row for batch in first for row in batch]
            lengths = batches.lengths
            before = padding_share(
                [lengths[index] for index in batch] for batch in plain_batches(loader, len(lengths), self.seed)
            )
            after = padding_share([sum(lengths[index] for index in row) for row in batch] for batch in first)
            if max(map(len, rows), default=0) < 2 or (self.capacity is None and before <= after):
                raise NothingToDoError(
                    f"callback.packing saves nothing: {len(lengths)} documents of {range_of(lengths)} tokens, by"
                    f" length={name_of(self.length)}, fill {len(rows)} rows of capacity={batches.capacity}, and plain"
                    f" batches of {loader.batch_size} have {before:.1%} of padding; write a larger"
                    " callback.packing.capacity, callback.packing.length=<a column> if the lengths are wrong, or"
                    " ~callback.packing"
                )
            self._documents = two_documents(packed)
        self.padding_before, self.padding_after = before, after
        ctx.info(
            f"packing: {len(lengths):,} documents of {range_of(lengths)} tokens in {len(rows):,} rows of at most"
            f" {batches.capacity}, {packed.batch_size} rows per batch; {after:.1%} of the tokens are padding, in plain"
            f" batches {before:.1%}"
        )
        return packed

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that there is one loader."""
        require_one_loader(trainer.train_dataloader, "callback.packing", "write ~callback.packing")

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step without caches; before the first step compare the losses of two documents."""
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
                        raise ConflictError(f"callback.packing and {error}, by length_bucketing") from error
                ctx.info("packing: in a row of two documents the loss of the second is its own")
            return proceed(*args, **kwargs)


def _loss(ctx: Run, args: Any, kwargs: Any, packed: dict[str, Tensor]) -> Tensor:
    """Return the loss of ``training_step`` for a batch, without other techniques."""
    batch = patches.on_device(ctx.trainer, {key: tensor.clone() for key, tensor in packed.items()})
    name = type(ctx.module).__name__
    try:
        output = type(ctx.strategy).training_step(ctx.strategy, batch, *args, **kwargs)  # of the class, without seams
    except (TypeError, LookupError, AttributeError) as error:
        if not any(key in str(error) for key in (*packed, "attention_mask")):
            raise
        raise ConflictError(
            f"callback.packing and {name}.training_step, which raised {type(error).__name__}: {error}; a batch is a"
            f" dict of {', '.join(packed)}, without an attention mask: pass position_ids to the model instead. A model"
            " that takes none can't keep documents apart: use batches of similar length, by length_bucketing"
        ) from error
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        raise ConflictError(
            f"callback.packing and {name}.training_step, which returned no loss for two documents: without it packing"
            " can't check whether they see one another; return a loss for every batch, or write ~callback.packing"
        )
    return loss  # type: ignore[no-any-return]
