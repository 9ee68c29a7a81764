"""Lion, whose update is the sign of a momentum: one state per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.optim.one_by_one import OneByOne


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
