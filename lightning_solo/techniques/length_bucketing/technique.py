"""Length bucketing: items of similar length share a batch, which has little padding."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng

from lightning_solo.data.item_lengths import item_lengths, name_of, range_of
from lightning_solo.data.length_batches import LengthBatches, padding_share
from lightning_solo.data.loaders import plain_batches, processes_of, require_own_batches, with_batches
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.length_bucketing.card import CARD, Settings


class LengthBucketing(Technique, Settings):
    """Makes the training loader batch items of similar length, in a new order in each epoch.

    The loader keeps its items, workers, collate function and other attributes. A run resumed within an epoch continues
    with exactly the remaining batches.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self.padding_before: float | None = None
        self.padding_after: float | None = None

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return the loader with other batches."""
        require_own_batches(loader, "callback.length_bucketing")
        if not len(loader.dataset):
            raise ConflictError(
                f"callback.length_bucketing and {type(loader.dataset).__name__}, a data set without items; add items,"
                " or ~callback.length_bucketing"
            )

        def report(done: int, count: int) -> None:
            ctx.info(f"length bucketing: read the lengths of {done:,} of {count:,} items")

        with isolate_rng():  # items may be augmented at random
            lengths = item_lengths(
                loader.dataset, self.length, loader.collate_fn, report, "callback.length_bucketing.length"
            )
        lengths = ctx.strategy.broadcast(lengths)
        plain = plain_batches(loader, len(lengths), self.seed)
        before = padding_share(lengths[batch].tolist() for batch in plain)
        if before == 0 and not self.max_tokens:
            raise NothingToDoError(
                f"callback.length_bucketing.length={name_of(self.length)}: no batch of {type(loader.dataset).__name__}"
                f" is padded, with {len(lengths)} items of length {range_of(lengths.tolist())} in batches of"
                f" {loader.batch_size}; write a larger batch_size, callback.length_bucketing.length=<a column> if the"
                " lengths are wrong, or ~callback.length_bucketing"
            )
        size = None if self.max_tokens else loader.batch_size
        batches = LengthBatches(lengths, size, self.max_tokens, loader.drop_last, self.seed, *processes_of(loader))
        after = padding_share(lengths[batch].tolist() for batch in batches.batches(batches.epoch))
        self.padding_before, self.padding_after = before, after
        ctx.info(
            f"length bucketing: {len(lengths):,} items of length {range_of(lengths.tolist())}, in {len(batches):,}"
            f" batches; {after:.1%} of the tokens are padding, in plain batches {before:.1%}"
        )
        return with_batches(loader, batches, batch_size=size)
