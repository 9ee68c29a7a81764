"""The base of this package's small optimizers, which step each parameter by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import GradientError
from lightning_solo.optim.param_groups import name_in, require_states


def require_range(owner: str, group: Mapping[str, Any]) -> None:
    """Check the hyperparameters of a group, as far as it has them."""
    for name in ("lr", "weight_decay", "eps"):
        if name in group and not float(group[name]) >= 0:
            raise ValueError(f"{owner}: {name}={group[name]}: write a number of at least 0")
    for beta in group.get("betas", ()):
        if not 0 <= beta < 1:
            raise ValueError(f"{owner}: betas={group['betas']}: write numbers from 0 to below 1")


class OneByOne(Optimizer):
    """An optimizer whose step of a parameter depends on no other one, so that `StepInBackward` is exact.

    At most one parameter's temporary tensors exist at a time. A subclass overrides `_update`.

    Attributes:
        steps_alone: tells `StepInBackward` that each parameter steps by itself.
        state_names: the states of a parameter that has been stepped.
    """

    steps_alone = True
    state_names: tuple[str, ...] = ()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after a check of its hyperparameters."""
        super().add_param_group(param_group)
        require_range(type(self).__name__, self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            GradientError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise GradientError(
                        f"{type(self).__name__}: the gradient of {name_in(self, p)} is sparse; write sparse=False for"
                        " its embedding"
                    )
                self._update(p, p.grad, group, self.state[p])
        return loss

    def _update(self, p: nn.Parameter, grad: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states that were saved by this class.

        Raises:
            CheckpointError: the states are of another optimizer; nothing has been changed.
        """
        require_states(self, state_dict, self.state_names)
        super().load_state_dict(state_dict)
