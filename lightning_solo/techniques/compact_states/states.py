"""Conversion of optimizers to compact states under one device budget, and the check for enough memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import BudgetError
from lightning_solo.machine import host_memory
from lightning_solo.memory.host_slabs import host_room, is_planned
from lightning_solo.memory.reading import free_device_bytes
from lightning_solo.optim import back_ends
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.back_end_facts import SETTINGS
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.conversion import compacted
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.torch_optimizers import SERVED, state_bytes
from lightning_solo.techniques.compact_states.card import Settings
from lightning_solo.units import format_bytes


def _is_plain(settings: Settings, corrections: Mapping[Tensor, Tensor]) -> bool:
    """Return whether nothing is compressed or moved to the host, so that every optimizer is supported."""
    bits = (settings.master_bits, settings.moment_bits)
    return bits == (32, 32) and not corrections and settings.budget is None


def _bytes_for(settings: Settings, optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's states, corrections included."""
    every = {p for p in parameters_of(optimizer) if p.requires_grad}
    if settings.back_end != "own":
        return sum(back_ends.device_bytes(p, settings.back_end) for p in every)
    layouts = [state_layout(p, settings.master_bits, settings.moment_bits) for p in every]
    if type(optimizer) in SERVED and type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        corrections = [{name: kept for name, kept in layout.items() if name == "correction"} for layout in layouts]
        return sum(map(bytes_of, corrections)) + state_bytes(optimizer)
    return sum(map(bytes_of, layouts))


def convert(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    settings: Settings,
    corrections: dict[Tensor, Tensor],
    put: Callable[[list[Optimizer]], None],
) -> list[Optimizer]:
    """Return compact versions of optimizers, under one budget for all.

    Args:
        optimizers: the optimizers of ``configure_optimizers``.
        schedulers: schedulers to attach to the new optimizers.
        settings: the technique's settings.
        corrections: corrections of split weights; each optimizer removes those of its parameters.
        put: called with all optimizers after each conversion, so that the replaced one is freed.
    """
    compact, left = list(optimizers), settings.budget
    owned = [set(parameters_of(optimizer)) for optimizer in compact]
    for number, own in enumerate(owned):
        others = set().union(*owned) - own  # unowned parameters may be added later
        taken = {p: lower for p, lower in corrections.items() if p not in others}
        if settings.budget is None:  # with a budget the optimizer moves them itself
            taken = {p: lower.to(p.device) for p, lower in taken.items()}
        compact[number] = optimizer = _converted(compact[number], schedulers, settings, taken, left)
        put(compact)
        for p in own:
            corrections.pop(p, None)
        del taken
        if isinstance(optimizer, CompactAdamW):
            optimizer.place_states()
            if isinstance(left, int):
                left = max(0, left - optimizer.state_bytes + optimizer.host_bytes)
    return compact


def _converted(
    optimizer: Optimizer,
    schedulers: Sequence[Any],
    settings: Settings,
    corrections: Mapping[Tensor, Tensor],
    budget: int | str | None,
) -> Any:
    if settings.back_end != "own":
        return back_ends.converted(optimizer, list(schedulers), back_end=settings.back_end)
    if _is_plain(settings, corrections):
        return optimizer
    return compacted(
        optimizer,
        list(schedulers),
        master_bits=settings.master_bits,
        moment_bits=settings.moment_bits,
        corrections=corrections,
        state_budget=budget,
    )


def require_room(
    optimizers: Sequence[Optimizer],
    settings: Settings,
    corrections: Mapping[Tensor, Tensor],
    module: nn.Module,
    device: torch.device,
) -> None:
    """Refuse states that don't fit in memory together with the module, before they are allocated."""
    if is_planned() or _is_plain(settings, corrections):
        return  # an arbitrary optimizer, with states of unknown size
    needed = sum(_bytes_for(settings, optimizer) for optimizer in optimizers)
    if settings.budget == "auto":
        needed = max(0, needed - host_room())
    elif settings.budget is not None:
        needed = min(needed, int(settings.budget))
    on_device = device.type != "cpu"
    needed -= sum(lower.nbytes for lower in corrections.values() if lower.device.type == device.type)  # there already
    free = free_device_bytes(module) if on_device else host_memory()[1]
    if needed <= free:
        return
    less = f"{SETTINGS}.moment_bits=4 {SETTINGS}.master_bits=16-stochastic"
    raise BudgetError(
        f"{SETTINGS}: optimizer states of {format_bytes(needed)} in {format_bytes(free)} that are free"
        f" on {'the device' if on_device else 'the host'}; write"
        f" {less if settings.back_end == 'own' else f'{SETTINGS}.back_end=own {less}'}, or take a smaller model",
        needed,
        free,
    )


def host_has_room(module: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Return whether the weights and states on the device fit on the host, where Lightning moves them after a fit."""
    every: list[Tensor] = list(module.parameters())
    for optimizer in optimizers:
        if isinstance(optimizer, CompactAdamW):
            every += [tensor for state in optimizer.state.values() for tensor in state.values()]
    leaving: int = sum(tensor.nbytes for tensor in every if tensor.is_cuda)
    return leaving <= host_room()
