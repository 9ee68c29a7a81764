"""The parameters of an optimizer's groups, and their names for messages: by number where the optimizer has no names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def name_in(optimizer: Optimizer, parameter: Tensor) -> str:
    """Return a parameter's name.

    Raises:
        KeyError: it is not one of this optimizer's.
    """
    names: Mapping[Tensor, str] = getattr(optimizer, "parameter_names", {})
    if parameter in names:
        return names[parameter]
    first = 0
    for group in optimizer.param_groups:
        for name, p in zip(names_of(group, first), group["params"], strict=True):
            if p is parameter:
                return name
        first += len(group["params"])
    raise KeyError("a parameter of another optimizer")


def names_of(group: Mapping[str, Any], first: int) -> Iterator[str]:
    """Yield the names of a group's parameters, of which the first is the optimizer's ``first``."""
    yield from group.get("param_names") or (f"parameter {first + i}" for i in range(len(group["params"])))


def saved_states(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Return the state in a state dict of each parameter of an optimizer, empty where it has none.

    Raises:
        CheckpointError: it is of another number of parameters.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = parameters_of(optimizer)
    if len(keys) != len(parameters):
        raise CheckpointError(f"states of {len(keys)} parameters; this optimizer has {len(parameters)}")
    return {p: state_dict["state"].get(key, {}) for key, p in zip(keys, parameters, strict=True)}


def load_groups(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the groups of a state dict without its states, by torch's ``load_state_dict``.

    Raises:
        CheckpointError: it has other groups.
    """
    try:
        Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    except ValueError as error:
        raise CheckpointError(f"states of other parameter groups: {error}") from error
    for group in optimizer.param_groups:
        for name, default in optimizer.defaults.items():
            group.setdefault(name, default)
