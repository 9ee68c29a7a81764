"""Read and write the fp32 masters and optimizer states in ZeRO's flat tensors, parameter by parameter."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_solo.errors import CheckpointError
from lightning_solo.zero.deepspeed_internals import (
    flat_tensors,
    in_memory,
    make_states,
    set_whole_state,
    trained_parameters,
    whole_state,
)


@dataclass(frozen=True)
class ParameterStates:
    """One parameter's states on the host: tensors of the parameter's shape, and plain values."""

    master: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


def read(zero: Any, folder: Path | None = None, *, masters_only: bool = False) -> dict[Tensor, ParameterStates]:
    """Return the states of every trainable parameter: views, or copies of those stored on disk.

    Args:
        zero: ZeRO's optimizer.
        folder: an empty folder for copies of states on disk. Its files are mapped into memory, and may then be removed.
            Without a folder, or where the disk is full, the copies are in memory.
        masters_only: leave the optimizer's states out.
    """
    if torch.distributed.get_world_size() > 1:
        return _read_over_processes(zero, masters_only=masters_only)
    states = {}
    for index, (flat, places) in enumerate(flat_tensors(zero)):
        with in_memory(zero, index) as from_disk:
            state = zero.optimizer.state.get(flat, {})
            tensors = {key: value for key, value in state.items() if is_elementwise(value, flat)}
            scalars = {key: value for key, value in state.items() if key not in tensors}
            if masters_only:
                tensors, scalars = {}, {}
            for number, place in enumerate(places):
                views = {name: place.of(value.detach()) for name, value in {"": flat, **tensors}.items()}
                if from_disk:
                    views = {
                        name: _copied(view, folder and folder / f"{index}-{number}-{name}")
                        for name, view in views.items()
                    }
                # Each gets a copy of the plain values: many parameters would increase a shared count too often.
                states[place.parameter] = ParameterStates(views.pop(""), views, copy.deepcopy(scalars))
    return states


def _read_over_processes(zero: Any, *, masters_only: bool) -> dict[Tensor, ParameterStates]:
    """Return the states, gathered from all processes, which must all call it; only the first keeps the optimizer's."""
    states = {}
    first = torch.distributed.get_rank() == 0
    for flat, parameters in trained_parameters(zero):
        state = {} if masters_only else zero.optimizer.state.get(flat, {})
        tensors = [key for key, value in state.items() if is_elementwise(value, flat)]
        scalars = {key: value for key, value in state.items() if key not in tensors}
        make_states(zero, flat, parameters, tensors)
        for parameter in parameters:
            whole = {key: whole_state(parameter, key).cpu() for key in tensors}
            master = whole_state(parameter).cpu()
            states[parameter] = ParameterStates(master, whole if first else {}, copy.deepcopy(scalars))
    return states


def _write_over_processes(zero: Any, states: Mapping[Tensor, ParameterStates]) -> None:
    """Write this process's part of whole states."""
    for flat, parameters in trained_parameters(zero):
        values = {p: states[p] for p in parameters if p in states}
        shared = _shared_scalars([value.scalars for value in values.values()])
        keys = dict.fromkeys(key for value in values.values() for key in value.tensors)
        make_states(zero, flat, parameters, keys)
        for parameter, value in values.items():
            set_whole_state(parameter, value.master)
            for key, whole in value.tensors.items():
                set_whole_state(parameter, whole, key)
        if shared:
            zero.optimizer.state[flat].update(shared)


def is_elementwise(value: object, flat: Tensor) -> bool:
    """Return whether a state has an element for each element of the flat tensor."""
    return torch.is_tensor(value) and value.shape == flat.shape and value.dim() > 0


def _copied(view: Tensor, path: Path | None) -> Tensor:
    if path is None or view.numel() == 0:
        return view.clone()
    try:  # writing a mapped file for which the disk has no space would kill the process
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, view.numel() * view.element_size())
    except OSError:
        return view.clone()
    mapped = torch.from_file(str(path), shared=True, size=view.numel(), dtype=view.dtype)
    return mapped.view(view.shape).copy_(view)


def write(zero: Any, states: Mapping[Tensor, ParameterStates]) -> None:
    """Copy states into the engine's flat tensors; other parameters keep theirs.

    Raises:
        CheckpointError: parameters that share a flat tensor differ in a plain value, such as the count of steps.
    """
    if torch.distributed.get_world_size() > 1:
        _write_over_processes(zero, states)
        return
    copies = [
        (index, flat, [(place, states[place.parameter]) for place in places if place.parameter in states])
        for index, (flat, places) in enumerate(flat_tensors(zero))
    ]
    scalars = [_shared_scalars([value.scalars for _, value in pairs]) for *_, pairs in copies]  # refused before a copy
    for (index, flat, pairs), shared in zip(copies, scalars, strict=True):
        if not pairs:
            continue
        with in_memory(zero, index, written=True):
            for place, value in pairs:
                place.of(flat.detach()).copy_(value.master)
            for key in dict.fromkeys(key for _, value in pairs for key in value.tensors):
                state = zero.optimizer.state[flat]
                if key not in state:  # a fresh engine has none: optimizers make them in their first step
                    state[key] = torch.zeros_like(flat, requires_grad=False)
                for place, value in pairs:
                    if key in value.tensors:
                        place.of(state[key]).copy_(value.tensors[key])
            if shared:  # an empty entry would count as existing states
                zero.optimizer.state[flat].update(shared)


def _shared_scalars(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for scalars in parameters for key in scalars)
    return {key: _shared(key, [scalars[key] for scalars in parameters if key in scalars]) for key in keys}


def _shared(key: str, values: list[Any]) -> Any:
    if any(bool(value != values[0]) for value in values):
        raise CheckpointError(
            f"the checkpoint's optimizer has a {key!r} for each parameter, from {min(values)} to {max(values)}; ZeRO"
            " keeps one for all, so it can't resume exactly: start from the weights, without the optimizer"
        )
    return values[0].clone() if torch.is_tensor(values[0]) else values[0]
