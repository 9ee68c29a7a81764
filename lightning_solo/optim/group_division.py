"""Division of an optimizer's groups, and of their learning rates, with what schedulers hold of each group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
"""Options of an optimizer's group that are learning rates, its own and those that schedulers put there."""
LISTS = ("base_lrs", "_last_lr", "max_lrs")
"""Lists of learning rates that schedulers hold, one for each group."""
OTHER_LISTS = ("lr_lambdas", "min_lrs", "base_momentums", "max_momentums")
"""Other lists of schedulers with an entry for each group."""


def divide_groups(
    optimizer: Optimizer, schedulers: Sequence[Any], key: Callable[[Tensor], Hashable]
) -> list[tuple[dict[str, Any], Any]]:
    """Divide an optimizer's groups so that the parameters of each have one key; return (group, key) of each group.

    Schedulers of the optimizer, also those inside others, get the new groups.
    """
    divided: list[tuple[dict[str, Any], Any]] = []
    origins: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [None] * len(group["params"]))
        by_key: dict[Hashable, list[tuple[Any, Tensor]]] = {}
        for name, p in zip(names, group["params"], strict=True):
            by_key.setdefault(key(p), []).append((name, p))
        for each, pairs in by_key.items():
            part = {**group, "params": [p for _, p in pairs]}
            if "param_names" in group:
                part["param_names"] = [name for name, _ in pairs]
            divided.append((part, each))
            origins.append(number)
    count = len(optimizer.param_groups)
    optimizer.param_groups[:] = [group for group, _ in divided]
    for scheduler in _of(optimizer, schedulers):
        for name in (*LISTS, *OTHER_LISTS):
            values = vars(scheduler).get(name)
            if isinstance(values, list) and len(values) == count:
                setattr(scheduler, name, [values[origin] for origin in origins])
    return divided


def scale_rates(optimizer: Optimizer, schedulers: Sequence[Any], factors: Sequence[float]) -> None:
    """Multiply the learning rates of each group, and those that schedulers hold of it, by the group's factor."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group.update({name: group[name] * factor for name in RATES if name in group})
    for scheduler in _of(optimizer, schedulers):
        for name in LISTS:
            values = vars(scheduler).get(name)
            if isinstance(values, list) and len(values) == len(factors):
                setattr(scheduler, name, [value * factor for value, factor in zip(values, factors, strict=True)])


def split_groups(optimizer: Optimizer, schedulers: Sequence[Any], factor: Callable[[Tensor], float]) -> None:
    """Split an optimizer's groups so that each parameter's learning rate is multiplied by its factor."""
    factors = [factor for _, factor in divide_groups(optimizer, schedulers, factor)]
    scale_rates(optimizer, schedulers, factors)


def _of(optimizer: Optimizer, schedulers: Iterable[Any]) -> Iterable[Any]:
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", None) is optimizer:
            yield scheduler
        yield from _of(optimizer, getattr(scheduler, "_schedulers", ()))
