"""Schedule-free AdamW: an average of the weights takes the place of a falling learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.optim.averages import WeightSwap
from lightning_solo.optim.one_by_one import OneByOne
from lightning_solo.optim.param_groups import parameters_of

TRAINED = "training_weight"
"""The state with a parameter's training weight in a file whose weights are the average."""


class ScheduleFreeAdamW(OneByOne):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): 8 bytes of states per parameter in fp32.

    Gradients are taken at ``y``, which the parameters hold in training. The model to validate and to save is the
    average ``x``:

    ```
    z' = z - rate * direction          direction = gradient / (root of exp_avg_sq + eps) + weight_decay * y
    x' = (1 - share) * x + share * z'  share = weight / sum of weights, weight = square of the largest rate so far
    y' = (1 - beta1) * z' + beta1 * x'
    ```

    Only ``z`` and ``exp_avg_sq`` are stored: ``x`` follows from ``y`` and ``z``. `evaluate` puts ``x`` into the
    parameters, and keeps ``y`` in host memory; `train` restores ``y`` to the bit.

    Args:
        params: parameters or groups, as for any optimizer of torch.
        lr: learning rate; a warm-up may change it, and no schedule needs to lower it.
        betas: the share of ``x`` in ``y``, and the decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient; of ``y``.

    Attributes:
        averages: tells `seams.averaged_weights` that the weights to validate and save are not those in training.

    Raises:
        ValueError: an argument is out of range.
    """

    averages = True
    state_names = ("step", "weights", "largest_rate", "z", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._swap = WeightSwap()

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out unknown attributes
        return {**super().__getstate__(), "_swap": self._swap}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after a check of its hyperparameters."""
        super().add_param_group(param_group)
        if not self.param_groups[-1]["betas"][0] > 0:
            raise ValueError("ScheduleFreeAdamW: betas[0]=0 leaves no average; write a number above 0, as 0.9")

    def _update(self, p: nn.Parameter, grad: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        if p in self._swap.aside or TRAINED in state:
            raise RuntimeError("the parameters hold the average; call optimizer.train() before forward")
        beta1, beta2 = group["betas"]
        if not state:
            state |= {"step": 0, "weights": 0.0, "largest_rate": 0.0}
            state |= {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}
        state["step"] += 1
        rate = float(group["lr"]) * math.sqrt(1 - beta2 ** state["step"])
        state["largest_rate"] = max(rate, state["largest_rate"])
        weight = state["largest_rate"] ** 2
        state["weights"] += weight
        share = weight / state["weights"] if weight else 0.0  # a warm-up may begin with a rate of 0
        z, square = state["z"], state["exp_avg_sq"]
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        direction = grad / square.sqrt().add_(group["eps"])
        if group["weight_decay"]:
            direction.add_(p, alpha=group["weight_decay"])
        # y' by inserting x = (y - (1 - beta1) z) / beta1 into the formulas of the class
        p.lerp_(z, share).add_(direction, alpha=-rate * (1 - beta1 * (1 - share)))
        z.add_(direction, alpha=-rate)

    def averaged(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter that was stepped, with its average."""
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in (state := self.state.get(p, {})):
                    holds = p in self._swap.aside
                    yield p, p.detach() if holds else p.detach().lerp(state["z"], 1 - 1 / group["betas"][0])

    def evaluate(self) -> None:
        """Put the average into the parameters; a second call does nothing."""
        self._swap.begin(self.averaged())

    @torch.inference_mode(False)
    @torch.no_grad()
    def train(self) -> None:
        """Put the training weights back into the parameters, or those of loaded states; a second call does nothing."""
        self._swap.end()
        for p, state in self.state.items():
            if TRAINED in state:
                p.copy_(state.pop(TRAINED))

    def state_dict(self) -> dict[str, Any]:
        """Return the states; with the training weights while the parameters hold the average."""
        states = super().state_dict()
        return self.saved(states) if self._swap.aside else states

    def saved(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this optimizer's state dict with the training weights, for a file whose weights are the average."""
        parameters = parameters_of(self)
        with_weights = {
            number: {TRAINED: self._swap.own(parameters[number]), **state}
            for number, state in state_dict["state"].items()
        }
        return {**state_dict, "state": with_weights}
