"""Batches of any nesting with shorter sequences, and those whose sequences aren't known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_solo.data.truncation import is_left_padded, sequences_of, truncated
from lightning_solo.errors import ConflictError
from tests.messages import mentions

B, T, W = 3, 10, 6
IDS = torch.arange(B * T).view(B, T)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (torch.ones(B, T), (B, 4)),  # weights of tokens
        (torch.ones(B, T, dtype=torch.bool), (B, 4)),
        (torch.ones(B, T, T, dtype=torch.bool), (B, 4, 4)),
        (torch.ones(B, 1, T, T), (B, 1, 4, 4)),  # a mask that is added
        (torch.ones(3, B, T, dtype=torch.int64), (3, B, 4)),  # positions in three dimensions
        (torch.ones(B, T, W), (B, 4, W)),
        (torch.ones(B, 7, T), (B, 7, T)),  # vectors as wide as the sequence is long
        (torch.ones(B, 3, 8, 8), (B, 3, 8, 8)),
        (torch.ones(B), (B,)),
        (torch.ones(B, W), (B, W)),
        (torch.tensor(1.0), ()),
    ],
)
def test_tensors_along_the_sequence_are_cut(tensor: Tensor, shape: tuple[int, ...]) -> None:
    batch = truncated({"ids": IDS, "other": tensor}, T, 4)
    assert batch["ids"].tolist() == IDS[:, :4].tolist()
    assert tuple(batch["other"].shape) == shape
    assert batch["other"].is_contiguous()
    assert batch["ids"].view(-1).untyped_storage().nbytes() == B * 4 * 8


def test_vectors_are_sequences_where_there_are_no_tokens() -> None:
    assert sequences_of((torch.zeros(B, T, W), torch.zeros(B).long())) == (B, T)
    assert sequences_of({"vectors": torch.zeros(B, 2, W), "ids": IDS}) == (B, T)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(B, 3, 8, 8), ["the batch (3, 3, 8, 8)"]),
        ([torch.zeros(B, W), torch.zeros(B).long()], ["0 (3, 6)", "1 (3,)"]),
        ({"mask": torch.ones(B, T, dtype=torch.bool)}, ["mask (3, 10)"]),
        ({"names": ["a", "b"]}, ["no tensors"]),
    ],
    ids=["images", "rows", "mask alone", "no tensors"],
)
def test_batches_without_sequences_are_refused(batch: Any, words: list[str]) -> None:
    with pytest.raises(ConflictError, match=mentions("(batch, sequence)", *words)) as refused:
        sequences_of(batch)
    assert "another by" not in str(refused.value)  # a setting of a technique


def test_sequences_of_two_lengths_or_of_unknown_place_are_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("source (3, 10)", "target (3, 7)", "collate")) as refused:
        sequences_of({"source": IDS, "target": IDS[:, :7]})
    assert " by" not in str(refused.value)  # a setting of a technique
    with pytest.raises(ConflictError, match=mentions("mask", "(3, 10, 10)", "booleans")):
        truncated({"ids": IDS, "mask": torch.zeros(B, T, T)}, T, 4)


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        ([[1, 1, 0], [1, 0, 0]], False),
        ([[1, 1, 1], [0, 1, 1]], True),
        ([[1, 1, 1], [0, 0, 0]], False),  # an empty row
        ([[1, 1, 2], [1, 2, 0]], False),  # numbers of documents
    ],
)
def test_padding_on_the_left_is_seen_in_the_mask(mask: list[list[int]], left: bool) -> None:
    for dtype in (torch.int64, torch.bool, torch.float32):
        assert is_left_padded({"ids": IDS, "attention_mask": torch.tensor(mask).to(dtype)}) is left
    assert not is_left_padded({"attention_mask": torch.zeros(2, 1, 3, 3)})  # added to scores
    assert not is_left_padded((IDS, torch.tensor(mask)))
