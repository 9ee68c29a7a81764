"""Batch samplers with a new order in each epoch, which can start at any batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import Sampler


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the random generator for an epoch's order; neighbouring seeds share no orders."""
    generator = torch.Generator().manual_seed(seed)
    return generator.manual_seed(int(torch.randint(2**62, (), generator=generator)) ^ epoch)


def share_of(batch: Sequence[Any], rank: int, processes: int) -> list[Any]:
    """Return a process's items of a batch; all processes get equally many, so a short batch's first items come again.

    >>> [share_of([5, 6, 7], rank, 2) for rank in (0, 1)]
    [[5, 7], [6, 5]]
    """
    count = -(-len(batch) // processes) * processes
    return list(islice(cycle(batch), rank, count, processes))


class EpochBatches(Sampler[Any]):
    """Batches in an order that depends only on a seed and an epoch number.

    Lightning counts an epoch in which a run stopped as completed, and gives its remaining batches the next number. So
    the epoch numbers here may differ from Lightning's.

    Attributes:
        count: batches of every epoch.
        needs_past: whether an epoch depends on the number of batches in earlier epochs.
        batches_used: largest number of an epoch's batches that are used.
        seed: seed of the orders.
        rank: the process that iterates, which gets its share of each batch.
        processes: number of processes among which each batch is split.
        epoch: the current epoch.
        start: number of the current epoch's first batches that are skipped.
    """

    count: int
    needs_past = False

    def __init__(self, seed: int, rank: int = 0, processes: int = 1) -> None:
        self.seed = seed
        self.rank, self.processes = rank, processes
        self.epoch = self.start = 0
        self.batches_used = sys.maxsize
        self._ahead: int | None = 0  # Lightning's epoch minus ours; None until Lightning's next epoch

    def batches(self, epoch: int) -> Iterable[Any]:
        """Return the batches of an epoch, of all processes together."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        """Return this process's share of the batches of the current epoch from ``start`` on."""
        batches = islice(self.batches(self.epoch), self.start, None)
        return batches if self.processes == 1 else (share_of(batch, self.rank, self.processes) for batch in batches)

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
