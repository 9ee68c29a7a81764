"""A count of all live tensors by kind, and the kinds that grow from one count to the next."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lightning_solo.memory.ledger import owned_by, storages_of

LEAST = 512
"""Least bytes of a storage: the smallest block of the CUDA allocator, about the size of its Python objects."""


@dataclass(frozen=True)
class Kind:
    """Tensors of one category, type, dtype and shape; with ``shape`` None, all tensors of a category."""

    category: str
    type: str = "tensors"
    dtype: str = ""
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.category} of any shape"
        name = "" if self.type == "Tensor" else f" {self.type}"
        return f"{self.dtype}{name} {self.shape} ({self.category})"


@dataclass
class Census:
    """The storages of all live tensors, including those that a graph saved: kind -> storage -> bytes."""

    kinds: dict[Kind, dict[int, int]] = field(default_factory=dict)

    def bytes(self, kind: Kind) -> int:
        """Return the bytes of a kind."""
        return sum(self.kinds.get(kind, {}).values())


@dataclass(frozen=True)
class Growth:
    """A kind that grew by some storages and bytes; ``kept`` are those of the first interval that are still alive."""

    kind: Kind
    count: int
    bytes: int
    kept: frozenset[int]


def live_tensors() -> list[Tensor]:
    """Return the tensors that the garbage collector tracks and that have a storage.

    Compilers' fake tensors are left out, and subclasses that wrap tensors, as shards: these tensors are tracked too.
    """
    # not isinstance(), since a lazy proxy would import or compute its __class__
    known: dict[type, bool] = {}
    tensors = []
    for one in gc.get_objects():
        kind = type(one)
        is_tensor = known.get(kind)
        if is_tensor is None:
            wraps = hasattr(kind, "__tensor_flatten__")
            is_tensor = known[kind] = issubclass(kind, Tensor) and not wraps and not issubclass(kind, FakeTensor)
        if is_tensor and storage_of(one) is not None:
            tensors.append(one)
    return tensors


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    with suppress(RuntimeError, NotImplementedError):  # wrappers of functorch and functional tensors have none
        return tensor.untyped_storage()
    return None


def graph_of(tensor: Tensor) -> Any:
    with suppress(RuntimeError):  # a view that was changed where its graph can't follow
        return tensor.grad_fn
    return None


def take_census(module: nn.Module | None = None, optimizers: Iterable[object] = ()) -> Census:
    """Return a census of the tensors that are alive now, garbage included."""
    owners = {
        storage._cdata: category for category, tree in owned_by(module, optimizers) for storage in storages_of(tree)
    }
    census, seen = Census(), set[int]()
    tensors = live_tensors()

    def count(tensor: Tensor, category: str) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in seen:
            return
        seen.add(storage._cdata)
        category = owners.get(storage._cdata, category)
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = max(storage.nbytes(), LEAST)
        for kind in (Kind(category, type(tensor).__name__, dtype, tuple(tensor.shape)), Kind(category)):
            census.kinds.setdefault(kind, {})[storage._cdata] = size

    for saved in saved_tensors(tensors):
        count(saved, "activations")
    for tensor in tensors:
        count(tensor, "other" if graph_of(tensor) is None else "activations")
    return census


def saved_tensors(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that the graphs of ``roots`` saved for backward and have not freed.

    Packed tensors are not unpacked, so no recomputation and no transfer starts.
    """
    names: dict[type, list[str]] = {}
    for node in graph_nodes([graph_of(root) for root in roots]):
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            with suppress(RuntimeError):  # freed
                saved = getattr(node, name)
                for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                    yield from (leaf for leaf in tree_leaves(getattr(one, "data", None)) if isinstance(leaf, Tensor))


def graph_nodes(stack: list[Any]) -> Iterator[Any]:
    """Yield each node of these graphs once."""
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)


def growths(censuses: Sequence[Census], least: int) -> list[Growth]:
    """Return the kinds that grew by at least ``least`` bytes from each census to the next, the largest first.

    A kind must still hold a storage of the first interval, which excludes batches that get longer.
    """
    grown = []
    first, last = censuses[0], censuses[-1]
    for kind in last.kinds:
        sizes = [census.bytes(kind) for census in censuses]
        steady = all(after - before >= least for before, after in pairwise(sizes))
        held = [census.kinds.get(kind, {}) for census in censuses]
        kept = frozenset.intersection(*(frozenset(one) for one in held[1:])) - held[0].keys()
        if steady and kept:
            count = len(last.kinds[kind]) - len(first.kinds.get(kind, {}))
            grown.append(Growth(kind, count, sizes[-1] - sizes[0], kept))
    with_shape = {growth.kind.category for growth in grown if growth.kind.shape is not None}
    grown = [growth for growth in grown if growth.kind.shape is not None or growth.kind.category not in with_shape]
    return sorted(grown, key=lambda growth: -growth.bytes)
