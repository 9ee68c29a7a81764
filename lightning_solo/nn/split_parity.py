"""Compare the losses and gradients of two runs: of a whole batch, and of its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_solo.attributes import replaced


class LossAndGradient(NamedTuple):
    """A loss and its gradients, as one tensor in float64 on the host."""

    loss: float
    gradient: Tensor


def loss_and_gradient(loss: Tensor, parameters: Iterable[Tensor]) -> LossAndGradient:
    """Return a loss with the current gradients of parameters."""
    gradients = [p.grad.detach().double().flatten().cpu() for p in parameters if p.grad is not None]
    return LossAndGradient(float(loss), torch.cat([*gradients, torch.zeros(1, dtype=torch.float64)]))


def difference(whole: LossAndGradient, split: LossAndGradient) -> float:
    """Return the larger of the differences in loss and in gradient, relative to the first run.

    >>> whole = LossAndGradient(2.0, torch.tensor([3.0, 4.0], dtype=torch.float64))
    >>> difference(whole, LossAndGradient(2.0, whole.gradient * 1.25))
    0.25
    """
    if whole.gradient.shape != split.gradient.shape:  # a parameter has a gradient in one run only
        return math.inf
    of_loss = abs(whole.loss - split.loss) / (abs(whole.loss) or 1.0)
    of_gradient = float((whole.gradient - split.gradient).norm() / (whole.gradient.norm() or 1.0))
    return float(torch.tensor([of_loss, of_gradient], dtype=torch.float64).max())  # NaN if either is


@contextmanager
def same_for_parts(module: nn.Module) -> Iterator[None]:
    """Disable dropout and BatchNorm statistics, which differ between a batch and its parts."""
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, nn.RNNBase):  # cuDNN runs no backward of RNNs in eval mode
                stack.enter_context(replaced(part, "dropout", 0.0))
            else:
                stack.enter_context(replaced(part, "training", False))
        yield
