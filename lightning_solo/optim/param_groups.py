"""The parameters of an optimizer's groups, their names (or numbers) for messages, and the loading of saved groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import wraps
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
        KeyError: the parameter is not in the optimizer.
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
    """Yield the names of a group's parameters; ``first`` is the optimizer-wide number of the first one."""
    yield from group.get("param_names") or (f"parameter {first + i}" for i in range(len(group["params"])))


def saved_states(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Return each parameter's state in a state dict; an empty dict where it has none.

    Raises:
        CheckpointError: the state dict has another number of parameters.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = parameters_of(optimizer)
    if len(keys) != len(parameters):
        raise CheckpointError(f"states of {len(keys)} parameters; this optimizer has {len(parameters)}")
    return {p: state_dict["state"].get(key, {}) for key, p in zip(keys, parameters, strict=True)}


def require_states(
    optimizer: Optimizer, state_dict: Mapping[str, Any], names: Iterable[str], of: Iterable[Tensor] | None = None
) -> None:
    """Check that the saved states of an optimizer's parameters, or of some, have these names."""
    states = saved_states(optimizer, state_dict)
    for p in states if of is None else of:
        if states[p] and (missing := [name for name in names if name not in states[p]]):
            raise CheckpointError(
                f"the states of {name_in(optimizer, p)} in the file have {', '.join(sorted(states[p]))}, and no"
                f" {', '.join(missing)}: they are not of {type(optimizer).__name__}; resume with the optimizer of the"
                " run that saved them, or start from the weights alone: MyModule.load_from_checkpoint(path)"
            )


def load_groups(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the groups of a state dict, without its states; the optimizer's states are cleared.

    Raises:
        CheckpointError: the state dict has other groups.
    """
    groups, saved = optimizer.param_groups, deepcopy(state_dict["param_groups"])
    sizes, here = ([len(group["params"]) for group in each] for each in (saved, groups))
    if sizes != here:
        raise CheckpointError(f"states of other parameter groups: of {sizes} parameters; this optimizer has {here}")
    for mine, theirs in zip(groups, saved, strict=True):
        theirs["params"] = mine["params"]
        names = {"param_names": mine["param_names"]} if "param_names" in mine else {}
        for name, default in {**optimizer.defaults, **names}.items():
            theirs.setdefault(name, default)
    optimizer.param_groups = saved
    optimizer.state = defaultdict(dict)


def with_hooks(load: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    """Wrap a ``load_state_dict`` so that it calls the optimizer's hooks before and after, as torch's own does."""

    @wraps(load)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        load(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    return load_state_dict
