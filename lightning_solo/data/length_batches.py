"""A batch sampler that groups items of similar length, with a fixed number of items or tokens per batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lightning_solo.data.epoch_batches import EpochBatches, epoch_generator
from lightning_solo.errors import ConflictError

# Largest relative difference of lengths in a bucket; the average padding is half of it.
SPREAD = 0.03


def padding_share(batches: Iterable[Sequence[int]]) -> float:
    """Return the share of padding in batches whose rows are padded to the longest of their batch.

    Args:
        batches: for each batch, the lengths of its rows.

    >>> round(padding_share([[1, 3], [4, 4]]), 4)  # 2 of 6 + 8
    0.1429
    """
    tokens = padded = 0
    for lengths in batches:
        tokens += sum(lengths)
        padded += max(lengths) * len(lengths)
    return 1 - tokens / padded if padded else 0.0


class LengthBatches(EpochBatches):
    """Batches of items of similar length, in a new order in each epoch.

    The items are sorted by length and cut into batches. Consecutive batches whose lengths differ by at most 3 % form a
    bucket, and in every epoch the items of a bucket are mixed again. Then the batches are shuffled. The batch with the
    longest item comes first, so that a batch too large for the device fails at once. The order depends only on seed
    and epoch. All epochs have equally many batches, and every item comes once per epoch.

    Args:
        lengths: (items,), the length of each item.
        batch_size: items in a process's batch; the batch of the shortest items may have fewer.
        max_tokens: largest number of tokens in a process's batch, padding included; instead of ``batch_size``.
        drop_last: leave out the items that do not fill a batch, different ones in each epoch.
        seed: of the order.
        rank: this process, which gets its share of each batch.
        processes: number of processes; a batch has as many items for each.

    Raises:
        ConflictError: an item is longer than ``max_tokens``, or ``drop_last`` is set together with ``max_tokens``.
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        if (batch_size is None) == (max_tokens is None):
            raise ConflictError(f"batch_size={batch_size} and max_tokens={max_tokens}: write one of them")
        if max_tokens is not None and drop_last:
            raise ConflictError(
                f"callback.length_bucketing.max_tokens={max_tokens} and DataLoader(drop_last=True): no batch is"
                " incomplete, since batches hold different numbers of items; write DataLoader(drop_last=False)"
            )
        if max_tokens is not None and len(lengths) and int(lengths.max()) > max_tokens:
            index = int(lengths.argmax())
            raise ConflictError(
                f"callback.length_bucketing.max_tokens={max_tokens}: item {index} has {int(lengths[index])} tokens;"
                f" write {int(lengths[index])} or more, or leave such items out of the data set"
            )
        super().__init__(seed, rank, processes)
        self.lengths = lengths
        self.batch_size = batch_size and batch_size * processes
        self.max_tokens = max_tokens
        self.drop_last = drop_last
        self.count = sum(map(len, self._buckets(self.lengths.sort(descending=True).values[: self._kept])))

    @property
    def _kept(self) -> int:
        count = len(self.lengths)
        return count - count % self.batch_size if self.drop_last and self.batch_size else count

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch."""
        generator = epoch_generator(self.seed, epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: self._kept]
        order = order[self.lengths[order].sort(descending=True, stable=True).indices]
        lengths = self.lengths[order]
        batches = []
        for cuts in self._buckets(lengths):
            first, last = cuts[0][0], cuts[-1][1]
            bucket = order[first:last][torch.randperm(last - first, generator=generator)].tolist()
            batches += [bucket[begin - first : end - first] for begin, end in cuts]
        # the batch with the longest item comes first
        longest = int(order[0]) if len(order) else None
        shuffled = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
        return sorted(shuffled, key=lambda batch: longest not in batch)

    def _buckets(self, lengths: torch.Tensor) -> list[list[tuple[int, int]]]:
        """Return the ranges of each bucket's batches, which have equal sizes so that any item fits into any of them."""
        falling = lengths.tolist()
        buckets: list[list[tuple[int, int]]] = []
        begin = 0
        while begin < len(falling):
            longest = falling[begin]
            size = self.batch_size or self.processes * max(1, (self.max_tokens or 0) // max(1, longest))
            bucket: list[tuple[int, int]] = []
            while begin < len(falling):
                end = min(begin + size, len(falling))
                if bucket and falling[end - 1] < (1 - SPREAD) * longest:
                    break
                bucket.append((begin, end))
                begin = end
            buckets.append(bucket)
        return buckets
