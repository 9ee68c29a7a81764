"""Packed rows: every document once, hardly any padding, and the loss of the documents alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_solo.data.packing import (
    IGNORED,
    PackedBatches,
    PackedCollate,
    pack_best_fit,
    packed_loader,
    two_documents,
)
from lightning_solo.errors import ConflictError, PresetError
from tests.messages import mentions
from tests.modules import collate_documents, documents

VOCABULARY = 61


LENGTHS = [5, 9, 3, 7, 2, 8, 4, 6, 1, 9, 3, 5]


def loader(lengths: list[int] = LENGTHS, **options: Any) -> DataLoader[Any]:
    return documents(lengths, VOCABULARY, **options)


# --- it acted ---


@given(lengths=st.lists(st.integers(0, 30), max_size=50), capacity=st.integers(30, 60))
@settings(max_examples=60)
def test_each_document_is_in_one_row_and_no_two_rows_fit_into_one(lengths: Any, capacity: int) -> None:
    rows = pack_best_fit(lengths, capacity)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    fills = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(fill <= capacity for fill in fills)
    assert len(fills) < 2 or fills[0] + fills[1] > capacity  # else one row would have taken both


def test_the_tightest_row_is_taken() -> None:
    # 8 and 6 open rows; 3 fits the second alone; 2 fills the first, and leaves 1 in the second
    assert pack_best_fit([2, 8, 3, 6], capacity=10) == [[1, 0], [3, 2]]


# --- rows and their boundaries ---


def test_boundaries_are_in_positions_and_labels() -> None:
    batch = PackedCollate(collate_documents, 5)(
        [[torch.tensor([4, 5, 6]), torch.tensor([7, 8])], [torch.tensor([9, 1])]]
    )
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8], [9, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 5, 6, -100, 8], [-100, 1, -100, -100, -100]]


def test_incomplete_batch_of_rows_is_left_out_on_request() -> None:
    lengths = torch.full((7,), 5)  # seven rows of one document
    assert [len(batch) for batch in PackedBatches(lengths, 8, 3).batches(0)] == [3, 3, 1]
    dropping = PackedBatches(lengths, 8, 3, drop_last=True)
    assert [len(batch) for batch in dropping.batches(0)] == [3, 3]
    assert len(dropping) == 2


def test_sampler_steps_back_to_the_last_batch_that_an_epoch_uses() -> None:
    batches = PackedBatches(torch.full((7,), 5), 8, 1)
    batches.batches_used = 4  # limit_train_batches=4
    batches.go_to(2, 0)
    batches.step_back()
    assert (batches.epoch, batches.start) == (1, 3)
    batches.step_back()
    assert (batches.epoch, batches.start) == (1, 2)


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_epoch_has_every_document_in_other_rows(drop_last: bool) -> None:
    batches = PackedBatches(torch.tensor(LENGTHS * 5), 13, 3, drop_last)
    epochs = [batches.batches(epoch) for epoch in range(3)]
    for epoch in epochs:
        documents = [index for batch in epoch for row in batch for index in row]
        assert len(documents) == len(set(documents))
        assert len(documents) == 60 or drop_last
        assert len(epoch) == len(batches)
        assert {len(batch) for batch in epoch[:-1]} == {3}
        assert len(epoch[-1]) == 3 or not drop_last
    assert {frozenset(row) for batch in epochs[0] for row in batch} != {
        frozenset(row) for batch in epochs[1] for row in batch
    }
    assert batches.batches(1) == epochs[1]


def test_documents_that_are_compared_are_of_one_row_with_labels() -> None:
    def few_labels(items: list[Tensor]) -> dict[str, Tensor]:
        made = collate_documents(items)
        return made if int(made["input_ids"][0, 0]) == 3 else {**made, "labels": made["labels"].fill_(IGNORED)}

    tried = two_documents(packed_loader(loader([9, 9, 4, 4], collate_fn=few_labels), capacity=13, rows=2))
    row, other = tried.in_row["input_ids"], tried.beside_other["input_ids"]
    assert row.shape == (2, 13)
    assert row[:, 9].tolist() == [3, 3]
    assert torch.equal(row[:, 9:], other[:, 9:])
    assert row[:, :9].ne(other[:, :9]).all()
    assert set(other.flatten().tolist()) <= set(range(VOCABULARY))
    assert tried.in_row["labels"][0].tolist() == [*[IGNORED] * 10, *row[0, 10:].tolist()]
    assert tried.in_row["position_ids"].tolist() == [[*range(9), *range(4)]] * 2
    assert tried.joined["position_ids"].tolist() == [[*range(13)]] * 2
    assert {name: tensor.tolist() for name, tensor in tried.by_itself.items()} == {
        name: tensor[:, 9:].tolist() for name, tensor in tried.in_row.items()
    }
    with pytest.raises(ConflictError, match=mentions("packing", "labels")):
        two_documents(packed_loader(loader([9, 4], collate_fn=few_labels), capacity=13))


@pytest.mark.parametrize("length", ["auto", lambda item: max(1, len(item))], ids=["by tokens", "miscounted"])
def test_documents_that_are_compared_have_tokens(length: Any) -> None:
    lengths = [16, 40, 0, 40, 17, 40, 40, 0, 29]
    tried = two_documents(packed_loader(loader(lengths), 42, length=length))
    assert [tensor["input_ids"].shape[1] for tensor in tried[:3]] == [33, 33, 16]


# --- no trace, and resuming ---


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_loader_resumes_and_leaves_its_source_unchanged(workers: int) -> None:
    source = loader(num_workers=workers)
    before = dict(vars(source))
    packed = packed_loader(source, rows=2)
    batches = iter(packed)
    next(batches)
    resumed = packed_loader(source, rows=2)
    resumed.load_state_dict(packed.state_dict())
    left = [batch["input_ids"].tolist() for batch in batches]
    assert [batch["input_ids"].tolist() for batch in resumed] == left
    assert len(left) == len(packed) - 1 > 0
    assert all(vars(source)[name] is value for name, value in before.items())


# --- what is refused ---


def test_documents_that_the_collate_function_makes_longer_are_refused() -> None:
    def padded(items: list[Tensor]) -> dict[str, Tensor]:
        return {name: each for name, each in collate_documents(items).items() if name != "attention_mask"}

    source = loader(collate_fn=padded)
    with pytest.raises(
        ConflictError, match=mentions("capacity=9", "callback.packing.length=collated", "attention_mask")
    ):
        list(packed_loader(source, 9, length=len))


@pytest.mark.parametrize("options", [{"capacity": 0}, {"rows": 0}])
def test_rows_without_room_and_batches_without_rows(options: dict[str, int]) -> None:
    with pytest.raises(PresetError, match=mentions(f"{next(iter(options))}=0", "at least 1")):
        packed_loader(loader(), **options)


def test_documents_without_tokens_are_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("2 documents", "callback.packing.length=auto", "column")):
        packed_loader(loader([0, 0]))


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("packing", "document 1", "9", "capacity=8", "capacity=9")):
        packed_loader(loader(), capacity=8)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda items: items[0][None], ["Tensor", "input_ids"]),
        (lambda items: {"input_ids": items[0][None]}, ["labels"]),
        (lambda items: {**collate_documents(items), "pixels": torch.zeros(1)}, ["pixels"]),
        (lambda items: {"input_ids": items[0][None, :-1], "labels": items[0][None, 1:]}, ["labels", "shifted"]),
    ],
)
def test_unsuitable_collate_function_is_refused_by_name(function: Any, words: list[str]) -> None:
    with pytest.raises(ConflictError, match=mentions("packing", *words)):
        next(iter(packed_loader(loader(collate_fn=function))))
