"""A batch sampler that draws from a growing share of the items, easiest first."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from lightning_solo.data.epoch_batches import EpochBatches, epoch_generator


@dataclass(frozen=True)
class Pace:
    """Growth of a share to 1: Platanios et al. 2019, arXiv 1903.09848, equations 6 and 7.

    >>> [Pace(0.1, 100, "linear").share(position) for position in (0, 50, 100, 200)]
    [0.1, 0.55, 1.0, 1.0]
    >>> round(Pace(0.1, 100, "root").share(25), 3)
    0.507
    """

    start: float  # the share at position 0
    duration: int  # the position at which the share is 1
    schedule: Literal["linear", "root"] = "linear"  # ``"linear"``, or ``"root"``, which grows fast at first

    def share(self, position: float) -> float:
        """Return the share at a position."""
        progress = position / self.duration
        if progress >= 1:
            return 1.0
        if self.schedule == "root":
            return math.sqrt(self.start**2 + progress * (1 - self.start**2))
        return self.start + progress * (1 - self.start)


class CurriculumBatches(EpochBatches):
    """Batches of items drawn at random from the easiest ones, whose share of all items grows to 1.

    No batch has an item twice. Until the end of the epoch in which the share reaches 1, an item may come several times
    in an epoch, or never. Later every item comes once per epoch, in a new order each time. An epoch has as many
    batches as without a curriculum. The items of a batch depend only on the arguments and on the batch's position, so
    an epoch may start at any batch.

    Args:
        difficulty: (items,), the difficulty of each item; ties keep the data set's order.
        batch_size: items of a process's batch; the last batch may be smaller in epochs in which every item comes once.
        pace: growth of the share, by optimizer steps, or by tokens if ``tokens`` is given.
        drop_last: leave out the items that do not fill a batch, different ones in each epoch.
        seed: seed of the draws.
        tokens: (items,), the tokens of each item; the position is then the number of tokens in all earlier batches.
        batches_used: number of an epoch's batches that are used; None for all.
        batches_per_step: batches in an optimizer step.
        begun: number of a known epoch, and the position at its first batch; later positions are counted from it.
        before: called before the first batch of an epoch is drawn; may still `order_by` a difficulty.
        rank: this process, which gets its share of each batch.
        processes: number of processes; a batch has as many items for each.

    Attributes:
        shares: the share at each batch drawn so far in the current epoch.
    """

    needs_past = True

    def __init__(
        self,
        difficulty: Tensor,
        batch_size: int,
        pace: Pace,
        drop_last: bool = False,
        seed: int = 0,
        tokens: Tensor | None = None,
        batches_used: int | None = None,
        batches_per_step: int = 1,
        begun: tuple[int, int] = (0, 0),
        before: Callable[[], None] = lambda: None,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        super().__init__(seed, rank, processes)
        self.order_by(difficulty)
        self.batch_size = batch_size = batch_size * processes
        self.pace = pace
        self.drop_last = drop_last
        self.tokens = tokens
        self.begun = begun
        self.before = before
        self.shares: list[float] = []
        self.batches_per_step = batches_per_step
        items = len(self.order)
        self.count = items // batch_size if drop_last else -(-items // batch_size)
        self.batches_used = self.count if batches_used is None else batches_used

    def order_by(self, difficulty: Tensor) -> None:
        """Order the items by a difficulty."""
        self.order = difficulty.sort(stable=True).indices

    def position(self, epoch: int) -> int:
        """Return the position at which an epoch begins; any position with share 1 if the share is 1 by then."""
        first, position = self.begun
        if self.tokens is None:
            return position + (epoch - first) * -(-self.batches_used // self.batches_per_step)
        for earlier in range(first, epoch):
            if self.pace.share(position) == 1:
                break
            for batch, _ in islice(self._drawn(earlier, position), self.batches_used):
                position += int(self.tokens[batch].sum())
        return position

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """Yield the batches of an epoch."""
        self.before()
        self.shares = []
        for batch, share in self._drawn(epoch, self.position(epoch)):
            self.shares.append(share)
            yield batch

    def _drawn(self, epoch: int, begin: int) -> Iterator[tuple[list[int], float]]:
        """Yield the batches of an epoch and their shares; the epoch begins at position ``begin``."""
        items, size = len(self.order), self.batch_size
        if self.pace.share(begin) == 1:
            order = torch.randperm(items, generator=epoch_generator(self.seed, epoch))
            for first in range(0, self.count * size, size):
                yield order[first : first + size].tolist(), 1.0
            return
        position = begin
        for index in range(self.count):
            if self.tokens is None:
                position = begin + index // self.batches_per_step
            share = self.pace.share(position)
            pool = min(items, max(size, round(share * items)))
            # one generator per batch, so that no batch depends on earlier ones
            places = random.Random(f"{self.seed} {epoch} {index}").sample(range(pool), min(size, pool))
            batch = self.order[places].tolist()
            yield batch, share
            if self.tokens is not None:
                position += int(self.tokens[batch].sum())
