"""Batch samplers with an order of each epoch's own, which start at any batch of it."""

from __future__ import annotations

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

    Attributes:
        count: batches of every epoch.
        seed: of the order.
        epoch: the present one; Lightning sets it, by `set_epoch`.
        start: batches of the present epoch that are passed over.
    """

    count: int

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = self.start = 0

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
        """Go to the start of an epoch, unless it is the present one."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0
