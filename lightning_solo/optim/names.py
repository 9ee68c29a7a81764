"""What messages call a parameter of an optimizer: by its name where the optimizer was given names, else by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def name_in(optimizer: Optimizer, parameter: Tensor) -> str:
    """Return a parameter's name.

    Raises:
        KeyError: it is none of this optimizer's.
    """
    own: Mapping[Tensor, str] = getattr(optimizer, "parameter_names", {})
    if parameter in own:
        return own[parameter]
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
