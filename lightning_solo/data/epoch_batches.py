"""Batch samplers with an order of each epoch's own, which start at any batch of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator for an epoch's order; epochs of neighbouring seeds have nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    return generator.manual_seed(int(torch.randint(2**62, (), generator=generator)) ^ epoch)


class EpochBatches(Sampler[Any]):
    """Batches whose order depends on a seed and the number of the epoch alone.

    Lightning numbers epochs otherwise where a run was stopped within one: it counts that one as completed, and calls
    what was left of it the next.

    Attributes:
        count: batches of every epoch.
        needs_past: whether an epoch depends on how many batches those before it had.
        batches_used: of an epoch, at most.
        seed: of the order.
        epoch: the present one.
        start: batches of the present epoch that are passed over.
    """

    count: int
    needs_past = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = self.start = 0
        self.batches_used = sys.maxsize
        self._ahead: int | None = 0  # of its own numbers are Lightning's; None: the next one of Lightning's tells

    def batches(self, epoch: int) -> Iterable[Any]:
        """Return the batches of an epoch."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the present epoch, from ``start`` on."""
        return islice(self.batches(self.epoch), self.start, None)

    @property
    def sampler(self) -> EpochBatches:
        """Itself: where Lightning looks for what takes an epoch's number."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of the epoch that has a number of Lightning's, unless it is the present one."""
        if self._ahead is None:
            self._ahead = epoch - self.epoch
        if (own := self.own(epoch)) != self.epoch:
            self.epoch, self.start = own, 0

    def own(self, epoch: int) -> int:
        """Return the own number of an epoch that has a number of Lightning's."""
        return epoch - (self._ahead or 0)

    def go_to(self, epoch: int, start: int) -> None:
        """Go to a place in an epoch of the own numbers; it is in the epoch that Lightning numbers next."""
        self.epoch, self.start, self._ahead = epoch, start, None

    def step_back(self) -> None:
        """Go back by one batch."""
        if self.start:
            self.go_to(self.epoch, self.start - 1)
        else:
            self.go_to(self.epoch - 1, min(self.count, self.batches_used) - 1)

    def follow(self, before: EpochBatches) -> None:
        """Take the place and the numbers of others."""
        self.epoch, self.start, self._ahead = before.epoch, before.start, before._ahead
