"""Make groups of equal blocks use one block's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, listed
from lightning_solo.nn.named_weights import parameter_bytes
from lightning_solo.nn.quantized import weights_in


@dataclass
class Sharing:
    """What blocks share.

    Attributes:
        groups: names of the blocks of each group.
        names: name of a parameter -> name of the one in the first block of its group, which is the same parameter.
        own: name of each shared parameter -> the parameter before; in first blocks a copy of its numbers.
        left_out: name of a parameter that each block keeps -> the reason.
        before, after: bytes of the module's parameters.
    """

    groups: list[list[str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    before: int = 0
    after: int = 0


@torch.no_grad()
def share_blocks(
    module: nn.Module, blocks: Mapping[str, nn.Module], group: int | None = None, start: str = "first", option: str = ""
) -> Sharing:
    """Make blocks of equal structure, in their order, share parameters in groups; buffers stay each block's own.

    Args:
        module: with the blocks.
        blocks: qualified name -> block.
        group: blocks that share; None for all of a kind.
        start: numbers of the "first" block, or the "mean" of the blocks'. Equal ones stay as they are to the bit.
        option: path of the settings, for messages.

    Raises:
        NothingToDoError: no two blocks have the same parameters.
        PresetError: the group doesn't divide the number of blocks of a kind.
        ConflictError: a block has weights in 4 or 8 bits.
    """
    sharing = Sharing(before=parameter_bytes(module))
    owners: dict[nn.Parameter, set[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        owners.setdefault(p, set()).add(name)
    for names in _kinds(blocks):
        size = group or len(names)
        if len(names) % size:
            fitting = [each for each in range(2, len(names) + 1) if len(names) % each == 0]
            raise PresetError(
                f"{option}.group={group}: there are {len(names)} {type(blocks[names[0]]).__name__} of one form"
                f" ({listed(names)}), which it doesn't divide; write {option}.group={' or '.join(map(str, fitting))}"
            )
        sharing.groups += [names[at : at + size] for at in range(0, len(names), size)]
    if not sharing.groups:
        raise NothingToDoError(
            f"{option}: no two blocks of {type(module).__name__} have the same parameters; there are"
            f" {listed([f'{name} ({type(block).__name__})' for name, block in blocks.items()], 8)}; write"
            f" {option}.blocks=[ClassName], or ~{option}"
        )
    if quantized := [name for name, block in blocks.items() if any(weights_in(part) for part in block.modules())]:
        raise ConflictError(f"{option} and {quantized[0]}, whose weights have 4 or 8 bits; load plain weights")
    earlier: dict[str, str] = {}
    for names in sharing.groups:
        every = [dict(blocks[name].named_parameters(remove_duplicate=False)) for name in names]
        for own, leader in every[0].items():
            parameters, full = [each[own] for each in every], [f"{name}.{own}" for name in names]
            if any((reason := _unfit(p, owners[p], tuple(f"{name}." for name in names))) for p in parameters):
                sharing.left_out[full[0]] = str(reason)
            elif len({p.requires_grad for p in parameters}) > 1:
                sharing.left_out[full[0]] = "frozen in some of the blocks"
            elif len({*parameters}) > 1:
                _share(module, sharing, leader, dict(zip(full, parameters, strict=True)), start)
            else:
                earlier |= dict.fromkeys(full[1:], full[0])
    sharing.names = sharing.names or earlier
    sharing.after = parameter_bytes(module)
    return sharing


def separate(module: nn.Module, sharing: Sharing) -> None:
    """Give each block of a group but the first parameters of its own, equal to those that it shares.

    Other techniques may have replaced the parameters since. Those that something outside the group shares stay.
    """
    every = [*module.named_parameters(remove_duplicate=False)]
    for first, *others in sharing.groups:
        within = tuple(f"{name}." for name in (first, *others))
        tied = {p for name, p in every if not name.startswith(within)}
        shared = {*module.get_submodule(first).parameters()} - tied
        for block in others:
            copies = {p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in shared}
            for part in module.get_submodule(block).modules():
                part._parameters.update({own: copies[p] for own, p in part._parameters.items() if p in copies})


@torch.no_grad()
def take_back(module: nn.Module, sharing: Sharing) -> None:
    """Give blocks the parameters and numbers that they had before they shared."""
    for name, before in sharing.own.items():
        now = module.get_parameter(name)
        if isinstance(before, nn.Parameter):
            before.data = before.to(now.device)
            _set(module, name, before)
        else:
            now.copy_(before)


@contextmanager
def as_before(module: nn.Module, own: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute with the numbers that its blocks had before they were shared."""
    now = {name: module.get_parameter(name) for name in own}
    try:
        for name, numbers in own.items():
            _set(module, name, nn.Parameter(numbers.to(now[name].device, now[name].dtype), requires_grad=False))
        yield
    finally:
        for name, p in now.items():
            _set(module, name, p)


def _share(
    module: nn.Module, sharing: Sharing, leader: nn.Parameter, parameters: Mapping[str, nn.Parameter], start: str
) -> None:
    first = next(iter(parameters))
    has_numbers = not (leader.is_meta or isinstance(leader, FakeTensor))
    alias = next(
        (name for name in sharing.names.values() if module.get_parameter(name) is leader), None
    )  # in its block
    if has_numbers:
        sharing.own |= parameters
        sharing.own[first] = leader.detach().clone() if alias is None else sharing.own[alias]
    differ = has_numbers and not all(torch.equal(one, other) for one, other in pairwise(parameters.values()))
    if start == "mean" and differ and alias is None:
        wide = torch.promote_types(leader.dtype, torch.float32)
        leader.copy_(sum((p.to(wide) for p in parameters.values()), torch.zeros((), dtype=wide)) / len(parameters))
    for name in list(parameters)[1:]:
        _set(module, name, leader)
        sharing.names[name] = first


def _kinds(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of two or more blocks with the same parameters, for each kind of block."""
    kinds: dict[object, list[str]] = {}
    for name, block in blocks.items():
        form = [(own, _shape(p), p.dtype) for own, p in block.named_parameters(remove_duplicate=False)]
        if form:
            kinds.setdefault((type(block), *form), []).append(name)
    return [names for names in kinds.values() if len(names) > 1]


def _shape(p: nn.Parameter) -> tuple[int, ...] | None:
    return None if isinstance(p, UninitializedParameter) else tuple(p.shape)


def _unfit(p: nn.Parameter, names: set[str], within: tuple[str, ...]) -> str | None:
    """Return why a parameter isn't shared, or None."""
    if isinstance(p, UninitializedParameter):
        return "without a shape before its first batch"
    if is_traceable_wrapper_subclass(p):
        return f"stored as {type(p).__name__}"
    outside = [name for name in names if not name.startswith(within)]
    return f"tied to {min(outside)}" if outside else None


def _set(module: nn.Module, name: str, p: nn.Parameter) -> None:
    part, _, own = name.rpartition(".")
    module.get_submodule(part)._parameters[own] = p
