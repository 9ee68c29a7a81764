"""Optimizers that step each parameter by itself: their base, Lion, and AdamW with moments in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import GradientError
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.param_groups import name_in, require_states


def require_range(owner: str, group: Mapping[str, Any]) -> None:
    """Check that a group's learning rate, weight decay, eps and betas are in range."""
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
        loss = None if closure is None else torch.enable_grad()(closure)()
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


class Lion(OneByOne):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2): 4 bytes of state per parameter in fp32.

    Every element moves by the learning rate. So the rate is 3 to 10 times lower than AdamW's, and the weight decay as
    many times higher (section 5 of the paper).

    Args:
        params: parameters or groups, as for any optimizer of torch.
        lr: learning rate.
        betas: of the momentum in the update, and of the momentum that is stored.
        weight_decay: decoupled from the gradient.

    Raises:
        ValueError: an argument is out of range.
    """

    state_names = ("momentum",)

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _update(self, p: nn.Parameter, grad: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum: Tensor = state["momentum"]
        direction = momentum.lerp(grad, 1 - beta1).sign_()
        p.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        momentum.lerp_(grad, 1 - beta2)


class AdamW8bit(CompactAdamW):
    """`CompactAdamW` with fp32 masters and moments in 8 bits: 2.06 bytes of states per parameter of fp32 weights."""

    _moment_bits: ClassVar[int] = 8

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, master_bits=32, moment_bits=self._moment_bits)


class AdamW4bit(AdamW8bit):
    """`CompactAdamW` with fp32 masters and moments in 4 bits, by torchao's codes: 1.06 bytes per parameter."""

    _moment_bits: ClassVar[int] = 4
