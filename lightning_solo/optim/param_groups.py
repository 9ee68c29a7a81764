"""The parameters of an optimizer's groups, and their names for messages: by number where the optimizer has no names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


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
