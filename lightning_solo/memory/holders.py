"""The holders of leaked tensors: the nearest objects with a name, found through the garbage collector."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_solo.memory.census import Growth, graph_nodes, graph_of, live_tensors, saved_tensors, storage_of
from lightning_solo.units import format_bytes

CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, MethodType, partial, GeneratorType)
"""Types of objects without a name, whose own holders are searched."""
CONTAINERS_AT_MOST = 100
TRIES = 3
"""Tensors of a kind for which a holder is searched, at most; each search visits all objects several times."""


@dataclass(frozen=True)
class Leak:
    """Kinds of tensors that grew, the largest first, and their holder; empty if no Python object holds them."""

    holder: str
    growths: tuple[Growth, ...]
    steps: int

    @property
    def bytes_per_step(self) -> int:
        """Growth of all kinds, per optimizer step."""
        return sum(growth.bytes for growth in self.growths) // self.steps

    def __str__(self) -> str:
        kinds = [f"{growth.count} {growth.kind}" for growth in self.growths[:3]]
        kinds += [f"{len(self.growths) - 3} kinds more"] if len(self.growths) > 3 else []
        held = f"held by {self.holder}" if self.holder else "held by no Python object, so by C++"
        return (
            f"{format_bytes(self.bytes_per_step)} more in each of {self.steps} optimizer steps: "
            f"{', '.join(kinds)}; {held}"
        )


def leaks_of(
    growths: Sequence[Growth], steps: int, module: nn.Module | None = None, ignored: Collection[int] = ()
) -> list[Leak]:
    """Return growths over ``steps`` optimizer steps by their holders, as `holder_of` names them."""
    holders = _Holders(module, ignored)
    by_holder: dict[str, list[Growth]] = {}
    for growth in growths:
        by_holder.setdefault(holders.of(growth.kept), []).append(growth)
    return [Leak(holder, tuple(parts), steps) for holder, parts in by_holder.items()]


class _Holders:
    """Finds the holders of storages, with few calls of the garbage collector, each of which visits all objects."""

    def __init__(self, module: nn.Module | None, ignored: Collection[int]) -> None:
        self.tensors = live_tensors()
        self.hidden = {*ignored, id(self.tensors), *_frames()}
        self.module = module
        self.roots: list[tuple[Tensor, set[int]]] | None = None
        self.known: dict[int, str] = {}

    def of(self, keys: Collection[int]) -> str:
        """Return the holder of a tensor with one of these storages, or of one whose graph saved it; "" for none."""
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
    """Return the tensors whose graph is not part of another tensor's graph, each with the storages that it saved."""
    nodes = [(tensor, node) for tensor in tensors if (node := graph_of(tensor)) is not None]
    inner = {child for node in graph_nodes([node for _, node in nodes]) for child, _ in node.next_functions}
    roots = [tensor for tensor, node in nodes if node not in inner]
    return [
        (root, {storage._cdata for one in saved_tensors([root]) if (storage := storage_of(one)) is not None})
        for root in roots
    ]


def _frames() -> set[int]:
    """Return the ids of the running frames, which hold tensors only during a step."""
    ids, frame = set(), sys._getframe()
    while frame is not None:
        ids.add(id(frame))
        frame = frame.f_back  # type: ignore[assignment]
    return ids


def holder_of(target: object, module: nn.Module | None = None, ignored: Collection[int] = ()) -> str | None:
    """Return the name of the nearest named object that keeps ``target`` alive; None if no object does.

    Args:
        target: the object; its referrers are followed.
        module: the module whose parts have names.
        ignored: ids of objects to leave out.
    """
    chain: list[Any] = [target]
    via = [-1]  # index of the object that each one holds
    hidden = {*ignored, *_frames(), id(chain), id(via)}
    seen = {id(target)}
    index = 0
    while index < min(len(chain), CONTAINERS_AT_MOST):
        referrers = gc.get_referrers(chain[index])
        hidden.add(id(referrers))
        for referrer in referrers:
            if id(referrer) in seen or id(referrer) in hidden:
                continue
            seen.add(id(referrer))
            if words := _named(referrer, chain[index], module):
                containers = " in ".join(_path(chain, via, index))
                return f"{containers} {words}" if containers else words
            if type(referrer) in CONTAINERS:
                chain.append(referrer)
                via.append(index)
        hidden.discard(id(referrers))
        del referrers
        index += 1
    return None


def _path(chain: Sequence[Any], via: Sequence[int], index: int) -> list[str]:
    """Return the types of the containers between the target and its holder, the innermost first."""
    kinds: list[str] = []
    while index > 0:
        if type(chain[index]) not in (CellType, MethodType, partial) and not _is_defaults(chain[index]):
            kinds.insert(0, type(chain[index]).__name__)
        index = via[index]
    return kinds


def _is_defaults(candidate: object) -> bool:
    owners = gc.get_referrers(candidate) if type(candidate) is tuple else []
    return any(isinstance(one, FunctionType) and one.__defaults__ is candidate for one in owners)


def _named(holder: Any, held: Any, module: nn.Module | None) -> str:
    """Return the name by which ``holder`` refers to ``held``; "" if there is none."""
    if isinstance(holder, FrameType):
        return f"`{name}` of the running {holder.f_code.co_name}" if (name := _key(holder.f_locals, held)) else ""
    if isinstance(holder, GeneratorType):
        return f"a local of the generator {holder.__qualname__}"
    if type(holder) is tuple and isinstance(held, CellType):
        owners = (one for one in gc.get_referrers(holder) if isinstance(one, FunctionType))
        owner = next((one for one in owners if one.__closure__ is holder), None)
        if owner is None:
            return ""
        name = _key(dict(zip(owner.__code__.co_freevars, holder, strict=True)), held)
        return f"`{name}` in the closure of {owner.__qualname__}"
    if isinstance(holder, FunctionType):
        kept = held is holder.__defaults__ or held is holder.__kwdefaults__
        return f"the defaults of {holder.__qualname__}" if kept else ""
    if type(holder) is dict:  # perhaps the attributes of an object
        owners = (one for one in gc.get_referrers(holder) if _attributes(one) is holder or isinstance(one, type))
        return next(filter(None, (_attribute(one, held, module) for one in owners)), "")
    return "" if type(holder) in CONTAINERS or isinstance(holder, Tensor) else _attribute(holder, held, module)


def _attribute(owner: Any, held: Any, module: nn.Module | None) -> str:
    name = _key(_attributes(owner), held)
    return f"`{name}` of {_called(owner, module)}" if name else ""


def _attributes(owner: Any) -> Any:
    with suppress(Exception):  # a proxy may raise anything
        return vars(owner) if isinstance(owner, type) else object.__getattribute__(owner, "__dict__")
    return {}


def _key(names: Any, held: Any) -> str:
    return next((str(key) for key, value in list(names.items()) if value is held), "")


def _called(holder: Any, module: nn.Module | None) -> str:
    if isinstance(holder, ModuleType):
        return f"the module {holder.__name__}"
    if isinstance(holder, type):
        return f"the class {holder.__name__}"
    name = next((name for name, part in module.named_modules() if part is holder), None) if module is not None else None
    return f"{type(holder).__name__} at {name}" if name else type(holder).__name__
