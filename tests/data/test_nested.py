"""Nested batches of all kinds are read, mapped and split by one rule."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_solo.data.batch_size import size_of
from lightning_solo.data.nested import leaves, map_tensors, tensors_of
from lightning_solo.data.splitting import part_of, samples_of
from lightning_solo.data.truncation import sequences_of, truncated
from lightning_solo.planner.batches import examples, sized
from tests.training import equal


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Graph:
    nodes: Any
    name: str = "train"
    scale: Any = field(default_factory=lambda: torch.tensor(2.0))


@dataclass(frozen=True, slots=True)
class Frozen:
    nodes: Any
    pair: Any


class Mine(list):  # type: ignore[type-arg]
    """A list of a user's class."""


class Items(MutableMapping[str, Any]):
    """Keeps its items in a dict, which a shallow copy shares."""

    def __init__(self, items: Any) -> None:
        self.items_of = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Keywords(Items):
    """Its constructor takes other arguments than its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)


def rows() -> Tensor:
    return torch.arange(10).view(5, 2)


def of_transformers(name: str, **items: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return {
        "BatchEncoding": transformers.BatchEncoding,
        "CausalLMOutput": lambda items: transformers.modeling_outputs.CausalLMOutput(**items),
    }[name](items)


NESTINGS = {
    "list": (lambda: [rows(), rows()], "0 1"),
    "tuple": (lambda: (rows(), rows()), "0 1"),
    "named tuple": (lambda: Pair(rows(), rows()), "0 1"),
    "dict": (lambda: {"x": rows(), "y": [rows(), {"z": rows()}]}, "x y.0 y.1.z"),
    "ordered dict": (lambda: OrderedDict(x=rows(), y=rows()), "x y"),
    "UserDict": (lambda: UserDict(x=rows(), y=rows()), "x y"),
    "UserList": (lambda: UserList([rows(), rows()]), "0 1"),
    "deque": (lambda: deque([rows(), rows()]), "0 1"),
    "mapping of a user's class": (lambda: Items({"x": rows(), "y": rows()}), "x y"),
    "mapping that can't be written": (lambda: MappingProxyType({"x": rows()}), "x"),
    "dataclass": (lambda: Graph(rows()), "nodes name scale"),
    "frozen dataclass": (
        lambda: Frozen(rows(), Pair(rows(), {"deep": Graph(rows())})),
        "nodes pair.0 pair.1.deep.nodes pair.1.deep.name pair.1.deep.scale",
    ),
    "list of a user's class": (lambda: [Mine([rows()]), None, 3, "train", ["a", "b"]], "0.0 1 2 3 4"),
    "tokenizer's batch": (
        lambda: of_transformers("BatchEncoding", input_ids=rows(), labels=rows()),
        "input_ids labels",
    ),
    "model's output": (lambda: of_transformers("CausalLMOutput", loss=torch.tensor(1.0), logits=rows()), "loss logits"),
}


def structure(batch: Any) -> Any:
    """Return the types of a batch and its parts, written apart from the package's walk."""
    if isinstance(batch, Mapping):
        return type(batch), {key: structure(value) for key, value in batch.items()}
    if isinstance(batch, (Graph, Frozen)):
        return type(batch), [structure(getattr(batch, name)) for name in batch.__dataclass_fields__]
    return (type(batch), [*map(structure, batch)]) if isinstance(batch, (list, tuple, deque, UserList)) else type(batch)


@pytest.mark.parametrize(("make", "paths"), NESTINGS.values(), ids=NESTINGS)
def test_every_nesting_is_kept_by_all_that_read_or_change_batches(make: Any, paths: str) -> None:
    batch, whole = make(), make()
    assert [path for path, _ in leaves(batch)] == paths.split()
    assert samples_of(batch) == examples(batch) == size_of(batch)[0] == sequences_of(batch)[0] == 5
    for changed, expected in (
        (map_tensors(batch, lambda tensor: tensor + 1), lambda tensor: tensor + 1),
        (truncated(batch, length=2, kept=1), lambda tensor: tensor[:, :1] if tensor.dim() else tensor),
        (part_of(batch, 1, 3, samples=5), lambda tensor: tensor[1:3] if tensor.dim() else tensor),
        (sized(batch, 5, 6), lambda tensor: torch.cat([tensor, tensor[:1]]) if tensor.dim() else tensor),
    ):
        assert structure(changed) == structure(batch)
        for (_, leaf), (_, before), (_, original) in zip(leaves(changed), leaves(batch), leaves(whole), strict=True):
            assert equal(leaf, expected(original) if isinstance(original, Tensor) else original)
            assert equal(before, original)


def test_a_class_with_other_arguments_becomes_a_dict() -> None:
    changed = map_tensors({"named": Keywords(x=rows())}, lambda tensor: tensor[:1])
    assert changed == {"named": {"x": changed["named"]["x"]}}
    assert type(changed["named"]) is dict


def test_packed_sequences_are_named_tuples() -> None:
    packed = map_tensors(pack_sequence([torch.zeros(3), torch.ones(2)]), torch.clone)
    assert packed.data.tolist() == [0, 1, 0, 1, 0]


def test_tensors_in_attributes_slots_and_cycles_are_found_once() -> None:
    class Slotted:
        __slots__ = ("x",)

    slotted, graph, tensor = Slotted(), SimpleNamespace(name="train"), rows()
    slotted.x = rows()
    graph.nodes, graph.back = [tensor, UserDict(again=tensor)], graph
    assert [id(each) for each in tensors_of({"graph": graph, "slotted": slotted, "numbers": range(10**12)})] == [
        id(tensor),
        id(slotted.x),
    ]


def test_tensors_that_a_mapping_makes_when_asked_are_all_found() -> None:
    class Lazy(Items):
        def __getitem__(self, key: str) -> Any:
            return torch.full((2,), self.items_of[key])

    lazy = [Lazy({str(index): index}) for index in range(20)]
    assert [int(tensor[0]) for tensor in tensors_of(lazy)] == [*range(20)]
