"""Batch samplers with a new order in each epoch, which can start at any batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the random generator for an epoch's order; neighbouring seeds share no orders."""
    generator = torch.Generator().manual_seed(seed)
    return generator.manual_seed(int(torch.randint(2**62, (), generator=generator)) ^ epoch)


class EpochBatches(Sampler[Any]):
    """Batches in an order that depends only on a seed and an epoch number.

    Lightning counts an epoch in which a run stopped as completed, and gives its remaining batches the next number. So
    the epoch numbers here may differ from Lightning's.

    Attributes:
        count: batches of every epoch.
        needs_past: whether an epoch depends on the number of batches in earlier epochs.
        batches_used: largest number of an epoch's batches that are used.
        seed: seed of the orders.
        epoch: the current epoch.
        start: number of the current epoch's first batches that are skipped.
    """

    count: int
    needs_past = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = self.start = 0
        self.batches_used = sys.maxsize
        self._ahead: int | None = 0  # Lightning's epoch minus ours; None until Lightning's next epoch

    def batches(self, epoch: int) -> Iterable[Any]:
        """Return the batches of an epoch."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the current epoch from ``start`` on."""
        return islice(self.batches(self.epoch), self.start, None)

    @property
    def sampler(self) -> EpochBatches:
        """Return itself, since Lightning calls ``set_epoch`` on a loader's ``batch_sampler.sampler``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of Lightning's epoch, unless already in it."""
        if self._ahead is None:
            self._ahead = epoch - self.epoch
        if (own := self.own(epoch)) != self.epoch:
            self.epoch, self.start = own, 0

    def own(self, epoch: int) -> int:
        """Return our number for Lightning's epoch."""
        return epoch - (self._ahead or 0)

    def go_to(self, epoch: int, start: int) -> None:
        """Go to batch ``start`` of our epoch; Lightning's next epoch number will mean this epoch."""
        self.epoch, self.start, self._ahead = epoch, start, None

    def step_back(self) -> None:
        """Go back by one batch."""
        if self.start:
            self.go_to(self.epoch, self.start - 1)
        else:
            self.go_to(self.epoch - 1, min(self.count, self.batches_used) - 1)

    def follow(self, before: EpochBatches) -> None:
        """Copy another sampler's position."""
        self.epoch, self.start, self._ahead = before.epoch, before.start, before._ahead
