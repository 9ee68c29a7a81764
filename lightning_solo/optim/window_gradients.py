"""The gradients that a window of micro-batches begins with, put back after a backward that has failed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.optim.param_groups import parameters_of


class WindowGradients:
    """Gradients as they were before the first backward of a window: nearly always none.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> gradients = WindowGradients([optimizer]); gradients.save(zeroed=True)
    >>> weight.sum().backward(); gradients.restore(); print(weight.grad)
    None
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._before: list[tuple[Tensor, Tensor | None]] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """Those that the optimizers train."""
        return [p for optimizer in self._optimizers for p in parameters_of(optimizer)]

    def save(self, *, zeroed: bool) -> None:
        """Remember the gradients that there are, unless they have been remembered; zeros need no copy."""
        if self._before is None:
            present = [(p, p.grad) for p in self.parameters if p.grad is not None]
            self._before = [(p, None if zeroed else grad.clone()) for p, grad in present]

    def restore(self) -> None:
        """Put gradients back, also those that an optimizer's ``zero_grad`` drops elsewhere."""
        if self._before is None:  # no backward has begun
            return
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for p in self.parameters:
            p.grad = None
        for p, grad in self._before:
            p.grad = torch.zeros_like(p) if grad is None else grad.clone()
