"""Equal blocks of a module: runs of children of one container that have the same class, settings and parameter shapes.

A trace of a module with fewer of them has the same operators as that of the whole, repeated less often.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)
_TABLES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_NUMBER = re.compile(r"(^|_)(i|id|idx|index|number|layer|block|depth)$")
"""Names of settings that hold a block's own number."""


class Run(NamedTuple):
    """Equal blocks that follow each other.

    Attributes:
        container: qualified name of the list of blocks.
        first: index of the first block in it.
        length: number of blocks.
    """

    container: str
    first: int
    length: int


def equal_runs(module: nn.Module, least: int) -> list[Run]:
    """Return the runs of at least ``least`` equal blocks, of which none is inside another.

    A block that shares a tensor or a submodule with another module equals none.
    """
    owners: dict[int, int] = {}  # id of a module or tensor -> number of modules that hold it
    for part in module.modules():
        for held in {id(each) for table in _TABLES for each in vars(part)[table].values() if each is not None}:
            owners[held] = owners.get(held, 0) + 1
    runs: list[Run] = []
    for name, container in module.named_modules():
        if type(container) not in _CONTAINERS or any(_inside(name, run) for run in runs):
            continue
        descriptions = [_described(block, number, owners) for number, block in enumerate(container)]
        first = 0
        while first < len(descriptions):
            end = first + 1
            while end < len(descriptions) and descriptions[first] and descriptions[end] == descriptions[first]:
                end += 1
            if end - first >= least:
                runs.append(Run(name, first, end - first))
            first = end
    return runs


@contextmanager
def shortened(module: nn.Module, runs: Sequence[Run], lengths: Sequence[int]) -> Iterator[None]:
    """Remove blocks from the end of each run, so that ``lengths`` are left, in this context."""
    tables = {run.container: module.get_submodule(run.container)._modules for run in runs}
    before = {name: dict(blocks) for name, blocks in tables.items()}
    try:
        for run, length in reversed(list(zip(runs, lengths, strict=True))):
            blocks = tables[run.container]
            names = list(blocks)
            kept = names[: run.first + length] + names[run.first + run.length :]
            rest = [blocks[name] for name in kept]
            if all(name.isdecimal() for name in names):
                kept = [str(number) for number in range(len(kept))]
            blocks.clear()
            blocks.update(zip(kept, rest, strict=True))
        yield
    finally:
        for name, blocks in tables.items():
            blocks.clear()
            blocks.update(before[name])


def look_alike(module: nn.Module, runs: Sequence[Run], optimizers: Sequence[Any] = ()) -> bool:
    """Return whether techniques and optimizers treat all blocks of each run in the same way."""
    groups = _groups(optimizers)
    for run in runs:
        blocks = list(module.get_submodule(run.container).children())[run.first : run.first + run.length]
        looks = [_look(block) for block in blocks]
        if len(blocks) < run.length or any(look != looks[0] for look in looks):
            return False
        for weights in zip(*(block.parameters() for block in blocks), strict=True):
            held = [groups.get(id(weight), (-1, ())) for weight in weights]
            if len({number for number, _ in held}) not in (1, run.length) or len({kind for _, kind in held}) > 1:
                return False
    return True


def _groups(optimizers: Sequence[Any]) -> dict[int, tuple[int, Any]]:
    """Return id of a parameter -> the number of its group, and the options that the group sets to other than 0."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    kinds = [frozenset(key for key, value in group.items() if key != "params" and _is_set(value)) for group in groups]
    return {
        id(weight): (number, kind)
        for number, (group, kind) in enumerate(zip(groups, kinds, strict=True))
        for weight in group["params"]
    }


def _is_set(value: Any) -> bool:
    return value is not None if isinstance(value, (Tensor, list, tuple, dict)) else bool(value)


def _inside(name: str, run: Run) -> bool:
    return name.startswith(f"{run.container}." if run.container else "") and name != run.container


def _look(block: nn.Module) -> list[Any]:
    look: list[Any] = []
    for name, part in block.named_modules():
        attributes = vars(part)
        hooks = [len(value) for key, value in attributes.items() if key.endswith("_hooks") and value is not None]
        tensors = [(key, _tensor(tensor)) for key, tensor in part._parameters.items()]
        look.append((name, type(part), hooks, "forward" in attributes, part.training, tensors))
    return look


def _described(block: nn.Module, number: int, owners: Mapping[int, int]) -> list[Any]:
    """Return a block's classes, settings and shapes; nothing if a part of it also belongs to another module."""
    description: list[Any] = []
    for name, part in block.named_modules():
        attributes = vars(part)
        held = [part, *(each for table in _TABLES for each in attributes[table].values() if each is not None)]
        if any(owners.get(id(each), 0) != 1 for each in held):
            return []
        description.append((name, type(part)))
        for key, value in attributes.items():
            if key in _TABLES:
                description.append([(tensor, _tensor(each)) for tensor, each in value.items()])
            elif type(value) is int and _NUMBER.search(key) and value == number:
                description.append((key, "the block's number"))
            else:
                description.append((key, _setting(value)))
    return description


def _tensor(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return type(tensor)
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _setting(value: Any) -> Any:
    """Return a setting for comparisons; objects are equal if blocks share them, such as a configuration."""
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, (list, tuple)):
        return type(value), [_setting(each) for each in value]
    if isinstance(value, dict):
        return type(value), [(key, _setting(each)) for key, each in value.items()]
    if isinstance(value, set):
        return type(value), sorted(map(repr, value))
    if isinstance(value, weakref.ref):  # recurrent layers have some to their weights
        return type(value), _setting(value())
    return getattr(value, "__func__", None) or id(value)  # of a method its function
