"""Batches are split over processes: equally many items for each, and together those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch

from lightning_solo.data.curriculum_batches import CurriculumBatches, Pace
from lightning_solo.data.epoch_batches import EpochBatches
from lightning_solo.data.length_batches import LengthBatches
from lightning_solo.data.packing import PackedBatches

ITEMS = 31
LENGTHS = torch.tensor([2 + index * 7 % 11 for index in range(ITEMS)])
KINDS: dict[str, Callable[..., EpochBatches]] = {
    "length": lambda size, **share: LengthBatches(LENGTHS, size, **share),
    "packed": lambda size, **share: PackedBatches(LENGTHS, 12, size, **share),
    "curriculum": lambda size, **share: CurriculumBatches(LENGTHS, size, Pace(0.2, 4), **share),
    "curriculum by tokens": lambda size, **share: CurriculumBatches(
        LENGTHS, size, Pace(0.2, 90, "root"), tokens=LENGTHS, **share
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_together_have_the_batches_of_one(kind: str, processes: int) -> None:
    whole = KINDS[kind](2 * processes)
    shares = [KINDS[kind](2, rank=rank, processes=processes) for rank in range(processes)]
    came_twice = 0
    for epoch in range(4):
        for each in (whole, *shares):
            each.set_epoch(epoch)
        together = list(zip(whole, *shares, strict=True))  # equally many batches
        assert len(together) == len(whole) == len(shares[0])
        for batch, *parts in together:
            assert len({len(part) for part in parts}) == 1
            assert set(chain(*parts)) == set(batch)
            came_twice += sum(map(len, parts)) - len(batch)
    assert came_twice > 0  # some batches can't be split equally
    shares[1].go_to(2, 3)
    resumed = list(shares[1])
    shares[1].go_to(2, 0)
    assert resumed == list(shares[1])[3:]


def test_batches_by_tokens_have_at_most_so_many_in_each_process() -> None:
    make: Any = partial(LengthBatches, LENGTHS, max_tokens=30, processes=2)
    first, second = make(rank=0), make(rank=1)
    for batch, other in zip(first, second, strict=True):
        assert len(batch) == len(other)
        assert max(len(each) * int(LENGTHS[each].max()) for each in (batch, other)) <= 30
    assert {*chain(*first), *chain(*second)} == set(range(ITEMS))
