"""Which live tensors grow in number from step to step, and what holds them, in words."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_solo.memory.ledger import storages_of
from lightning_solo.units import format_bytes

CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, MethodType, partial, GeneratorType)
"""Passed through on the way to whoever has a name for them."""
LEAST = 512
"""Bytes of a storage at least: the smallest block of the CUDA allocator, and about what the objects around it take."""
CONTAINERS_AT_MOST = 100
TRIES = 3
"""Tensors of a kind whose holder is looked for, which takes a look at all objects there are, several times."""


@dataclass(frozen=True)
class Kind:
    """What tensors are counted together: of one category, type, dtype and shape; ``shape`` is None for all of them."""

    category: str
    type: str = "tensors"
    dtype: str = ""
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """In words, behind a count."""
        if self.shape is None:
            return f"{self.category} of any shape"
        tied = "" if self.type == "Tensor" else f" {self.type}"
        return f"{self.dtype}{tied} {self.shape} ({self.category})"


@dataclass
class Census:
    """The storages of all live tensors, those that a graph saved included: by kind, bytes by storage."""

    kinds: dict[Kind, dict[int, int]] = field(default_factory=dict)

    def bytes(self, kind: Kind) -> int:
        """Return the bytes of a kind."""
        return sum(self.kinds.get(kind, {}).values())


@dataclass(frozen=True)
class Growth:
    """A kind that grew: by how many storages and bytes, and those that came first and are still there."""

    kind: Kind
    count: int
    bytes: int
    kept: frozenset[int]


@dataclass(frozen=True)
class Leak:
    """What grew, and who holds it.

    Attributes:
        holder: in words; empty where no Python object holds it.
        growths: by kind, the largest first.
        steps: optimizer steps over which it grew.
    """

    holder: str
    growths: tuple[Growth, ...]
    steps: int

    @property
    def bytes_per_step(self) -> int:
        """Growth of all kinds."""
        return sum(growth.bytes for growth in self.growths) // self.steps

    def __str__(self) -> str:
        kinds = [f"{growth.count} {growth.kind}" for growth in self.growths[:3]]
        kinds += [f"{len(self.growths) - 3} kinds more"] if len(self.growths) > 3 else []
        held = f"held by {self.holder}" if self.holder else "held by no Python object, so by C++"
        return (
            f"{format_bytes(self.bytes_per_step)} a step more in each of {self.steps} optimizer steps: "
            f"{', '.join(kinds)}; {held}"
        )


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python knows of and that has a storage."""
    # not isinstance(): it asks an object for its __class__, which a lazy proxy answers by importing or computing
    known: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        is_tensor = known.get(kind)
        if is_tensor is None:
            is_tensor = known[kind] = issubclass(kind, Tensor)
        if is_tensor and _storage(one) is not None:
            found.append(one)
    return found


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    with suppress(RuntimeError, NotImplementedError):  # wrappers of functorch and functional tensors have none
        return tensor.untyped_storage()
    return None


def _graph(tensor: Tensor) -> Any:
    with suppress(RuntimeError):  # a view that was changed where its graph can't follow
        return tensor.grad_fn
    return None


def take_census(module: nn.Module | None = None, optimizers: Sequence[Optimizer] = ()) -> Census:
    """Return what is alive now, without a collection of garbage before.

    Args:
        module: its parameters and buffers are ``weights``, the parameters' ``.grad`` ``gradients``.
        optimizers: tensors in their ``state`` are ``optimizer_states``.
    """
    owners = {
        storage._cdata: category for category, tree in _owned(module, optimizers) for storage in storages_of(tree)
    }
    census, seen = Census(), set[int]()
    tensors = live_tensors()

    def count(tensor: Tensor, category: str) -> None:
        storage = _storage(tensor)
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
        count(tensor, "other" if _graph(tensor) is None else "activations")
    return census


def _owned(module: nn.Module | None, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    yield "optimizer_states", [list(optimizer.state.values()) for optimizer in optimizers]
    if module is not None:
        parameters = list(module.parameters())
        yield "gradients", [parameter.grad for parameter in parameters]
        yield "weights", [parameters, list(module.buffers())]


def saved_tensors(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield what the graphs of ``roots`` saved for backward and have not freed, as it lies there.

    Nothing is unpacked: a recomputation or a transfer back is not set off.
    """
    names: dict[type, list[str]] = {}
    for node in _nodes([_graph(root) for root in roots]):
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            with suppress(RuntimeError):  # freed
                saved = getattr(node, name)
                for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                    yield from (leaf for leaf in tree_leaves(getattr(one, "data", None)) if isinstance(leaf, Tensor))


def _nodes(stack: list[Any]) -> Iterator[Any]:
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

    What grew must still hold a storage that came between the first two: batches that get longer don't.
    """
    found = []
    first, last = censuses[0], censuses[-1]
    for kind in last.kinds:
        sizes = [census.bytes(kind) for census in censuses]
        steady = all(after - before >= least for before, after in pairwise(sizes))
        held = [census.kinds.get(kind, {}) for census in censuses]
        kept = frozenset.intersection(*(frozenset(one) for one in held[1:])) - held[0].keys()
        if steady and kept:
            count = len(last.kinds[kind]) - len(first.kinds.get(kind, {}))
            found.append(Growth(kind, count, sizes[-1] - sizes[0], kept))
    told = {growth.kind.category for growth in found if growth.kind.shape is not None}
    found = [growth for growth in found if growth.kind.shape is not None or growth.kind.category not in told]
    return sorted(found, key=lambda growth: -growth.bytes)


def leaks_of(
    found: Sequence[Growth], steps: int, module: nn.Module | None = None, ignored: Collection[int] = ()
) -> list[Leak]:
    """Return growths by who holds them.

    Args:
        found: of the tensors that are alive now.
        steps: over which they grew.
        module: names of its parts are told.
        ignored: ids of objects that hold tensors for a moment only.
    """
    holders = _Holders(module, ignored)
    by_holder: dict[str, list[Growth]] = {}
    for growth in found:
        by_holder.setdefault(holders.of(growth.kept), []).append(growth)
    return [Leak(holder, tuple(parts), steps) for holder, parts in by_holder.items()]


class _Holders:
    """Finds who holds storages; each question to the garbage collector goes through all objects there are."""

    def __init__(self, module: nn.Module | None, ignored: Collection[int]) -> None:
        self.tensors = live_tensors()
        self.hidden = {*ignored, id(self.tensors), *_frames()}
        self.module = module
        self.roots: list[tuple[Tensor, set[int]]] | None = None
        self.known: dict[int, str] = {}

    def of(self, keys: Collection[int]) -> str:
        """Return who holds a tensor with one of these storages, itself or in the graph of another; "" if nobody."""
        held = [tensor for tensor in self.tensors if tensor.untyped_storage()._cdata in keys]
        self.hidden.add(id(held))
        if words := next(filter(None, map(self._holder, held[:TRIES])), ""):
            return words
        if self.roots is None:
            self.roots = graph_roots(self.tensors)
            self.hidden |= {id(self.roots), *map(id, self.roots)}
        inside = [root for root, saved in self.roots if not saved.isdisjoint(keys)]
        self.hidden.add(id(inside))
        words = next(filter(None, map(self._holder, inside[:TRIES])), "")
        return f"the graph of a tensor in {words}" if words else ""

    def _holder(self, tensor: Tensor) -> str:
        if id(tensor) not in self.known:
            self.known[id(tensor)] = holder_of(tensor, self.module, self.hidden) or ""
        return self.known[id(tensor)]


def graph_roots(tensors: Iterable[Tensor]) -> list[tuple[Tensor, set[int]]]:
    """Return the tensors whose graph is part of no other one's, with the storages that each saved."""
    nodes = [(tensor, node) for tensor in tensors if (node := _graph(tensor)) is not None]
    inner = {child for node in _nodes([node for _, node in nodes]) for child, _ in node.next_functions}
    roots = [tensor for tensor, node in nodes if node not in inner]
    return [
        (root, {storage._cdata for one in saved_tensors([root]) if (storage := _storage(one)) is not None})
        for root in roots
    ]


def _frames() -> set[int]:
    """Return the ids of the frames that run now: what they hold ends with the step."""
    found, frame = set(), sys._getframe()
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def holder_of(target: object, module: nn.Module | None = None, ignored: Collection[int] = ()) -> str | None:
    """Return the nearest object with a name that keeps ``target`` alive, in words; None if there is none.

    Args:
        target: of which the referrers are followed.
        module: parts of it are told by their name.
        ignored: ids of objects that don't count.
    """
    found: list[Any] = [target]
    via = [-1]  # index of what each one holds
    hidden = {*ignored, *_frames(), id(found), id(via)}
    seen = {id(target)}
    index = 0
    while index < min(len(found), CONTAINERS_AT_MOST):
        referrers = gc.get_referrers(found[index])
        hidden.add(id(referrers))
        for referrer in referrers:
            if id(referrer) in seen or id(referrer) in hidden:
                continue
            seen.add(id(referrer))
            if words := _named(referrer, found[index], module):
                containers = " in ".join(_path(found, via, index))
                return f"{containers} {words}" if containers else words
            if type(referrer) in CONTAINERS:
                found.append(referrer)
                via.append(index)
        hidden.discard(id(referrers))
        del referrers
        index += 1
    return None


def _path(found: Sequence[Any], via: Sequence[int], index: int) -> list[str]:
    """Return the types of the containers between the target and who has a name for the last, the innermost first."""
    kinds: list[str] = []
    while index > 0:
        if type(found[index]) not in (CellType, MethodType, partial) and not _is_defaults(found[index]):
            kinds.insert(0, type(found[index]).__name__)
        index = via[index]
    return kinds


def _is_defaults(candidate: object) -> bool:
    owners = gc.get_referrers(candidate) if type(candidate) is tuple else []
    return any(isinstance(one, FunctionType) and one.__defaults__ is candidate for one in owners)


def _named(holder: Any, held: Any, module: nn.Module | None) -> str:
    """Return the name that ``holder`` has for ``held``, or "" if it has none."""
    if isinstance(holder, FrameType):
        return f"`{name}` of the running {holder.f_code.co_name}" if (name := _key(holder.f_locals, held)) else ""
    if isinstance(holder, GeneratorType):
        return f"a local of the generator {holder.__qualname__}"
    if type(holder) is tuple and isinstance(held, CellType):
        owners = (one for one in gc.get_referrers(holder) if isinstance(one, FunctionType))
        owner = next((one for one in owners if one.__closure__ is holder), None)
        name = "" if owner is None else _key(dict(zip(owner.__code__.co_freevars, holder, strict=True)), held)
        return f"`{name}` in the closure of {owner.__qualname__}" if owner is not None else ""
    if isinstance(holder, FunctionType):
        kept = held is holder.__defaults__ or held is holder.__kwdefaults__
        return f"the defaults of {holder.__qualname__}" if kept else ""
    if type(holder) is dict:  # the attributes of an object, if it is one's
        owners = (one for one in gc.get_referrers(holder) if _attributes(one) is holder or isinstance(one, type))
        return next(filter(None, (_attribute(one, held, module) for one in owners)), "")
    return "" if type(holder) in CONTAINERS or isinstance(holder, Tensor) else _attribute(holder, held, module)


def _attribute(owner: Any, held: Any, module: nn.Module | None) -> str:
    name = _key(_attributes(owner) or {}, held)
    return f"`{name}` of {_called(owner, module)}" if name else ""


def _attributes(owner: Any) -> Any:
    with suppress(Exception):  # a proxy's answer may be anything
        return object.__getattribute__(owner, "__dict__") if not isinstance(owner, type) else vars(owner)
    return None


def _key(names: Any, held: Any) -> str:
    return next((str(key) for key, value in list(names.items()) if value is held), "")


def _called(holder: Any, module: nn.Module | None) -> str:
    if isinstance(holder, ModuleType):
        return f"the module {holder.__name__}"
    if isinstance(holder, type):
        return f"the class {holder.__name__}"
    name = next((name for name, part in module.named_modules() if part is holder), None) if module is not None else None
    return f"{type(holder).__name__} at {name}" if name else type(holder).__name__
