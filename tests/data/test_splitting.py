"""Batches are split along their batch dimension, whatever their tensors are nested in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_solo.data.loss_weights import labels_of, weight_of
from lightning_solo.data.splitting import even_ranges, samples_of, split_evenly
from lightning_solo.errors import ConflictError
from lightning_solo.presets.compose import compose
from tests.messages import mentions, nearest


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Graph:
    nodes: Any
    name: str = "train"
    scale: Any = field(default_factory=lambda: torch.tensor(2.0))


def rows(samples: int = 5, width: int = 2) -> Tensor:
    return torch.arange(samples * width).view(samples, width)


# --- what batches are nested in ---


def test_tensor_is_split_evenly() -> None:
    parts = split_evenly(rows(), 2)
    assert [(part.tolist(), count) for part, count in parts] == [
        ([[0, 1], [2, 3]], 2),
        ([[4, 5], [6, 7]], 2),
        ([[8, 9]], 1),
    ]


def test_parts_are_views_and_a_batch_that_fits_is_itself() -> None:
    batch = {"x": rows()}
    first, _ = split_evenly(batch, 3)
    assert first[0]["x"].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr()
    assert split_evenly(batch, 5)[0][0] is batch


def test_arrays_file_names_and_what_all_share() -> None:
    names = [f"{index}.png" for index in range(5)]
    batch = {
        "x": rows(),
        "array": numpy.arange(5),
        "files": names,
        "classes": ["cat", "dog"],
        "temperature": torch.tensor(2.0),
        "split": "train",
    }
    (one, _), (other, _) = split_evenly(batch, 3)
    assert (one["files"], other["files"]) == (names[:3], names[3:])
    assert (one["array"].tolist(), other["array"].tolist()) == ([0, 1, 2], [3, 4])
    for part in (one, other):
        assert (part["classes"], part["split"]) == (["cat", "dog"], "train")
        assert part["temperature"] is batch["temperature"]


@pytest.mark.parametrize("dim", [1, -1])
def test_batch_dimension_other_than_the_first(dim: int) -> None:
    parts = split_evenly([rows(3, 5), rows(3, 5)], 3, batch_dim=dim)
    assert [part[1].tolist() for part, _ in parts] == [rows(3, 5)[:, :3].tolist(), rows(3, 5)[:, 3:].tolist()]


def test_batch_dimensions_by_paths() -> None:
    batch = {"x": rows(), "time": rows(3, 5), "graph": Graph(rows(7)), "pair": [rows(), rows(4, 5)]}
    dims = {"time": 1, "graph.nodes": None, "pair.1": -1}
    (part, count), _ = split_evenly(batch, 4, dims)
    assert count == 3
    assert (part["time"].shape, part["pair"][1].shape) == ((3, 3), (4, 3))
    assert part["graph"].nodes is batch["graph"].nodes


def test_a_list_of_a_shared_path_is_shared() -> None:
    batch = {"x": rows(), "classes": [*"abcde"]}
    (part, _), _ = split_evenly(batch, 4, {"classes": None})
    assert part["classes"] == [*"abcde"]


@given(samples=st.integers(1, 60), most=st.integers(1, 70))
def test_ranges_are_few_and_even(samples: int, most: int) -> None:
    ranges = even_ranges(samples, most)
    lengths = [last - first for first, last in ranges]
    assert [index for first, last in ranges for index in range(first, last)] == [*range(samples)]
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert len(ranges) == -(-samples // most)


# --- what can't be split ---


def test_lengths_that_differ_are_named_with_the_remedy() -> None:
    with pytest.raises(ConflictError, match=mentions("time (3, 5)", "x (5, 2)", "batch_dim={time:1}", "{time:null}")):
        samples_of({"x": rows(), "y": rows(), "time": rows(3, 5).float()})


BATCHES = {
    "sequences first": {"x": rows(), "y": rows(), "time": rows(3, 5)},
    "edges": {"nodes": rows(7), "edge": rows(2, 9), "labels": rows(7)},
    "a list": [rows(), rows(3, 5)],
    "a tensor": rows(),
    "no such dimension": {"x": rows(), "y": torch.zeros(5)},
}
SPLIT = [("a tensor", 0), ("a tensor", 1), ("no such dimension", 0)]


@pytest.mark.parametrize(
    ("batch", "batch_dim"), [(BATCHES[name], dim) for name in BATCHES for dim in range(3) if (name, dim) not in SPLIT]
)
def test_remedies_split_the_batch(batch: Any, batch_dim: int) -> None:
    with pytest.raises(ConflictError, match=mentions("split=f")) as caught:
        samples_of(batch, batch_dim)
    for remedy in re.findall(r"batch_dim=(\S+)", str(caught.value).partition("; write ")[2]):
        settings = compose("micro_batching", [f"callback.micro_batching.batch_dim={remedy}"]).techniques[0].settings
        assert samples_of(batch, settings.batch_dim) > 1


def test_dimension_of_another_length_is_not_offered() -> None:
    with pytest.raises(ConflictError, match=mentions("edge (2, 9)")) as caught:
        samples_of(BATCHES["edges"])
    assert "{edge:1}" not in str(caught.value)


def test_tensors_that_may_be_indices_of_rows_are_not_offered_to_be_shared() -> None:
    graph = {
        "x": torch.zeros(20, 8),
        "edge_index": torch.zeros(2, 40).long(),
        "graph": rows(20, 1),
        "y": rows(4).float(),
    }
    with pytest.raises(ConflictError, match=mentions("edge_index (2, 40)", "write split=f")) as caught:
        samples_of(graph)
    assert "to share" not in str(caught.value)


def test_missing_dimension_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("batch_dim={x:2}", "x", "(5, 2)", "batch_dim=0")):
        samples_of({"x": rows()}, {"x": 2})


@pytest.mark.parametrize("batch", [{"a": 1}, [], None, torch.tensor(1.0), ["a.png", "b.png"]], ids=repr)
def test_a_batch_without_a_batch_dimension(batch: Any) -> None:
    with pytest.raises(ConflictError, match=mentions(type(batch).__name__, "split=")):
        samples_of(batch)


def test_object_with_hidden_tensors_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("SimpleNamespace", "graph", "split=")):
        samples_of({"x": rows(), "graph": SimpleNamespace(nodes=[rows()])})
    assert samples_of({"x": rows(), "graph": SimpleNamespace(name="train")}) == 5


def test_an_object_that_refers_to_itself() -> None:
    one = SimpleNamespace(name="train")
    one.other = SimpleNamespace(back=one)
    assert samples_of({"x": rows(), "settings": one}) == 5
    one.other.nodes = rows()
    with pytest.raises(ConflictError, match=mentions("SimpleNamespace", "settings", "split=")):
        samples_of({"x": rows(), "settings": one})


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("0 (5,)", "1 (3,)", "split=")):
        samples_of(pack_sequence([torch.zeros(3), torch.zeros(2)]))


def test_unknown_path_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("tmie", nearest("time"), "x, time")):
        samples_of({"x": rows(5, 5), "time": rows(5, 5)}, {"tmie": 1})


# --- weights ---

LABELS = torch.tensor([[7, 1, -100], [-100, 3, -100], [-100, -100, -100]])


@pytest.mark.parametrize(("by", "weight"), [("samples", 3), ("tokens", 3), ("shifted_tokens", 2), ("counts", 6)])
def test_weights_of_a_part(by: str, weight: int) -> None:
    batch = {"labels": LABELS, "counts": torch.tensor([1, 2, 3])}
    assert weight_of(batch, 3, by) == weight
    assert sum(weight_of(part, count, by) for part, count in split_evenly(batch, 2)) == weight


def test_half_precision_weights_are_added_up_exactly() -> None:
    assert weight_of({"counts": torch.ones(4097, dtype=torch.float16)}, 4097, "counts") == 4097


def test_labels_are_found_by_name_or_as_the_last_item() -> None:
    for batch in (
        {"labels": LABELS},
        SimpleNamespace(labels=LABELS),
        [rows(), LABELS],
        (rows(), {"labels": LABELS}),
        Pair(rows(), LABELS),
    ):
        assert labels_of(batch) is LABELS
    for other in ({"x": rows()}, [LABELS], [rows(), torch.zeros(5)], [rows(), torch.ones(5, dtype=torch.bool)], 3):
        assert labels_of(other) is None


@pytest.mark.parametrize("by", ["tokens", "shifted_tokens"])
def test_tokens_without_labels_are_refused(by: str) -> None:
    with pytest.raises(ConflictError, match=mentions(by, "labels", "weight_by=samples")):
        weight_of({"x": rows()}, 5, by)


@pytest.mark.parametrize("batch", [{"x": rows(), "counts": [1, 2]}, Graph(rows())], ids=["mapping", "dataclass"])
def test_weights_of_a_name_that_no_tensor_has(batch: Any) -> None:
    with pytest.raises(ConflictError, match=mentions("weight_by='counts'", "shifted_tokens")):
        weight_of(batch, 5, "counts")


def test_names_are_cut_and_sizes_are_not() -> None:
    (part, _), _ = split_evenly({"x": rows(2), "size": (32, 64), "names": ("a", "b"), "ids": [7, 8]}, 1)
    assert (part["size"], part["names"], part["ids"]) == ((32, 64), ("a",), [7])


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("weight_by='labels'", "negative", "weight_by=tokens")):
        weight_of({"labels": torch.tensor([1, -100])}, 2, "labels")
