"""The engine's states as plain checkpoint entries, which torch and Lightning load without DeepSpeed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError
from lightning_solo.optim.adamw_state_dict import require_plain
from lightning_solo.zero.host_optimizer import HostOptimizer, from_original_state, to_original_state
from lightning_solo.zero.states import ParameterStates

LOOPS = ("foreach", "fused", "capturable")  # options of how, not what, a step computes: a checkpoint's are ignored
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")  # of the engine, for its log


@dataclass(frozen=True)
class Group:
    """A parameter group and its original content.

    Attributes:
        options: the optimizer's dictionary, in which the engine replaces the parameters by flat tensors.
        given: a copy of ``options`` from before that.
    """

    options: dict[str, Any]
    given: dict[str, Any]

    @property
    def parameters(self) -> list[Tensor]:
        """The module's parameters."""
        parameters: list[Tensor] = self.given["params"]
        return parameters

    @property
    def own_options(self) -> dict[str, Any]:
        """The options that the user's optimizer has, with their current values."""
        loops = {key: self.given[key] for key in LOOPS if key in self.given}
        return {key: self.options[key] for key in self.given if key != "params"} | loops

    def restore(self) -> None:
        """Restore the user's options and parameters, and remove keys that the engine added."""
        options = {**self.own_options, "params": self.parameters}
        self.options.clear()
        self.options.update(options)


def groups_of(optimizer: Optimizer) -> list[Group]:
    """Return an optimizer's groups; call it before `host_optimizer` and the engine change them."""
    return [Group(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups]


def plain_state_dict(module: nn.Module, values: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    """Return ``module.state_dict()``, with its hooks, for parameters that have the values in ``values``."""
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        state: dict[str, Any] = module.state_dict()
    finally:
        for parameter, data in before.items():
            parameter.data = data
    return state


def frozen_names(module: nn.Module) -> list[str]:
    """Return the names of parameters that are not trained."""
    return [name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]


def load_weights(module: nn.Module, state: Mapping[str, Any], *, left_out: Iterable[str], strict: bool) -> None:
    """Load a state dict in which the weights ``left_out`` may be missing; those keep their values.

    Raises:
        RuntimeError: torch's, where ``strict`` and other names are missing or unknown.
    """
    missing, unexpected = module.load_state_dict(state, strict=False)
    if strict and (unexpected or set(missing) - set(left_out)):
        module.load_state_dict(state, strict=True)


def optimizer_state_dict(
    host: HostOptimizer, groups: Sequence[Group], states: Mapping[Tensor, ParameterStates]
) -> dict[str, Any]:
    """Return the state dict that the user's own optimizer would have after the same training."""
    numbers = {p: number for number, p in enumerate(p for group in groups for p in group.parameters)}
    saved: dict[str, Any] = {"state": {}, "param_groups": []}
    for group in groups:
        saved["param_groups"].append({**group.own_options, "params": [numbers[p] for p in group.parameters]})
    for parameter, number in numbers.items():
        state = states.get(parameter)
        if state is not None and (state.tensors or state.scalars):
            saved["state"][number] = to_original_state(host, {**state.scalars, **state.tensors})
    return saved


def load_optimizer(
    host: HostOptimizer,
    groups: Sequence[Group],
    saved: Mapping[str, Any],
    masters: Mapping[Tensor, Tensor],
) -> dict[Tensor, ParameterStates]:
    """Load the options from an optimizer's state dict, and return its states by parameter.

    Raises:
        CheckpointError: the groups differ from the checkpoint's, or its states are compact.
    """
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group.parameters) for group in groups]
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {theirs} parameters, this module's has {ours}; give"
            " configure_optimizers the groups of the run that saved it, or start from its weights alone"
        )
    states, without = {}, 0
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        group.options.update({key: value for key, value in saved_group.items() if key not in ("params", *LOOPS)})
        for parameter, number in zip(group.parameters, saved_group["params"], strict=True):
            if parameter not in masters:  # frozen
                continue
            require_plain(
                masters[parameter], saved["state"].get(number, {}), f"parameter {number}", "DeepSpeed's engine"
            )
            state = from_original_state(host, saved["state"].get(number, {}))
            without += not state
            tensors = {key: value for key, value in state.items() if _is_elementwise(key, value, parameter, masters)}
            scalars = {key: value for key, value in state.items() if key not in tensors}
            states[parameter] = ParameterStates(masters[parameter], tensors, scalars)
    if 0 < without < len(states):
        warnings.warn(
            f"zero_offload: {without} of {len(states)} parameters have no optimizer state in the checkpoint (the run"
            " that saved it never used them); ZeRO counts their steps with the others'",
            stacklevel=2,
        )
    return states


def _is_elementwise(key: str, value: object, parameter: Tensor, masters: Mapping[Tensor, Tensor]) -> bool:
    return key != "step" and torch.is_tensor(value) and value.shape == masters[parameter].shape


def counters(engine: Any) -> dict[str, dict[str, Any]]:
    """Return the engine's step counts and the state of the fp16 loss scaler, as plain values."""
    scaler = vars(engine.optimizer.loss_scaler)
    return {
        "engine": {name: getattr(engine, name) for name in COUNTERS},
        "loss_scaler": {name: value for name, value in scaler.items() if isinstance(value, int | float)},
    }


def set_counters(engine: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the values of `counters`; those that this engine lacks are ignored."""
    for owner, values in ((engine, "engine"), (engine.optimizer.loss_scaler, "loss_scaler")):
        for name, value in saved.get(values, {}).items():
            if hasattr(owner, name):
                setattr(owner, name, value)
