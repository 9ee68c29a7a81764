"""Matrices that adapt a student's features to a teacher's width: stepped by the run's optimizer, in no module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError
from lightning_solo.nn.teacher import OPTION
from lightning_solo.optim.split_optimizer import SplitOptimizer
from lightning_solo.seams.run import Run


class Projections:
    """Projections by the student's layer; while they are attached the optimizer's last group has them.

    So they have its learning rate, schedule, decay and clipping. The optimizer's state dict for a file is without them,
    which a run without projections loads, too; their states are in `state_dict`.
    """

    def __init__(self) -> None:
        self.weights: dict[str, nn.Parameter] = {}
        self._states: dict[str, Any] = {}  # of the optimizer, while they aren't attached
        self._optimizer: Optimizer | None = None

    def attach(self, optimizer: Optimizer, device: torch.device) -> None:
        """Add all to an optimizer, until `detach`; a second call does nothing."""
        if self._optimizer is optimizer:
            return
        self._optimizer = optimizer
        for name, p in self.weights.items():
            p.data = p.data.to(device)
            self._join(name, p)

    def add(self, name: str, inputs: int, outputs: int, like: Tensor) -> nn.Parameter:
        """Return a new projection (outputs, inputs), with the first values of an `nn.Linear`, alike in each run.

        Args:
            name: of the student's layer.
            inputs: width of the student's features.
            outputs: width of the teacher's.
            like: has its device and type.
        """
        generator, bound = torch.Generator().manual_seed(len(self.weights)), inputs**-0.5
        values = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
        p = self.weights[name] = nn.Parameter(values.to(like.device, like.dtype))
        self._join(name, p)
        return p

    def _join(self, name: str, p: nn.Parameter) -> None:
        assert self._optimizer is not None
        group = self._optimizer.param_groups[-1]
        group["params"].append(p)
        if "param_names" in group:
            group["param_names"].append(f"projection of {name}")
        if state := self._states.pop(name, None):
            on_host = {"step"} if not group.get("fused") and not group.get("capturable") else {}  # as torch keeps it
            self._optimizer.state[p] = {
                key: each.to(p.device) if isinstance(each, Tensor) and key not in on_host else each
                for key, each in state.items()
            }

    def detach(self) -> None:
        """Remove all from the optimizer; they keep their states."""
        optimizer, self._optimizer = self._optimizer, None
        if optimizer is None or not self.weights:
            return
        group = optimizer.param_groups[-1]
        for name, p in self.weights.items():
            at = next(number for number, each in enumerate(group["params"]) if each is p)
            for key in ("params", "param_names"):
                if key in group:
                    del group[key][at]
            if p in optimizer.state:
                self._states[name] = optimizer.state.pop(p)
            p.data, p.grad = p.data.cpu(), None

    def without(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict without the projections that are attached."""
        if self._optimizer is None or not self.weights:
            return states
        *groups, last = states["param_groups"]
        count = len(last["params"]) - len(self.weights)
        gone = set(last["params"][count:])
        last = {**last, **{key: last[key][:count] for key in ("params", "param_names") if key in last}}
        kept = {number: state for number, state in states["state"].items() if number not in gone}
        return {**states, "state": kept, "param_groups": [*groups, last]}

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimizer states by name, in host memory; empty without projections."""
        if not self.weights:
            return {}
        states = {} if self._optimizer is None else self._optimizer.state
        by_name = {name: states.get(p, self._states.get(name)) for name, p in self.weights.items()}
        return {
            "weights": {name: p.detach().cpu() for name, p in self.weights.items()},
            "states": {
                name: {key: _on_host(each) for key, each in state.items()} for name, state in by_name.items() if state
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], layers: Iterable[str]) -> None:
        """Take weights and states of the projections of some layers; the next `attach` adds them."""
        weights, states = (state.get(key, {}) for key in ("weights", "states"))
        self.weights = {name: nn.Parameter(weights[name].clone()) for name in layers if name in weights}
        self._states = {name: dict(states[name]) for name in self.weights if name in states}


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def require_one_optimizer(ctx: Run, why: str) -> Optimizer:
    """Return the optimizer that is to train projections.

    Raises:
        ConflictError: its parameters are stored or stepped in a way of its own.
    """
    optimizer: Optimizer = ctx.strategy.optimizers[0]
    name = type(optimizer).__name__
    if ctx.release is not None:
        other, remedy = ctx.release.option, f"write ~{ctx.release.option}"
    elif ctx.strategy.handles_gradient_accumulation or not ctx.window.gradients_stay:
        other, remedy = type(ctx.strategy).__name__, "write Trainer(strategy='auto'), or ~strategy"
    elif ctx.trainer.world_size > 1:  # nothing averages its gradients
        other, remedy = f"a run on {ctx.trainer.world_size} processes", "write Trainer(devices=1)"
    elif isinstance(optimizer, SplitOptimizer) or getattr(optimizer, "averages", False):
        other, remedy = name, "train by torch's AdamW, without what replaces it"
    else:
        return optimizer
    raise ConflictError(
        f"{OPTION}.features: {why}, so a projection would be trained, for which {other} has no place; {remedy}, or name"
        " layers of one width"
    )
