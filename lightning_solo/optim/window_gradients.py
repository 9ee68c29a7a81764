"""Restore the gradients of an open window of micro-batches after a failed backward, or from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError
from lightning_solo.memory.sharded_tensors import local, shards_like
from lightning_solo.optim.param_groups import parameters_of


class WindowGradients:
    """Gradients that exist before the first backward of a window; usually there are none.

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
        """The parameters that the optimizers train."""
        return [p for optimizer in self._optimizers for p in parameters_of(optimizer)]

    def save(self, *, zeroed: bool) -> None:
        """Save the current gradients; only the first call does so. Zeroed ones need no copy."""
        if self._before is None:
            present = [(p, p.grad) for p in self.parameters if p.grad is not None]
            self._before = [(p, None if zeroed else grad.clone()) for p, grad in present]

    def restore(self) -> None:
        """Restore the gradients; gradients that an optimizer keeps elsewhere are dropped by its ``zero_grad``."""
        if self._before is None:  # no backward has begun
            return
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for p in self.parameters:
            p.grad = None
        for p, grad in self._before:
            p.grad = torch.zeros_like(p) if grad is None else grad.clone()


def gradients_of(optimizers: Iterable[Optimizer]) -> list[Tensor | None]:
    """Return the gradients of all parameters of optimizers, in order; of shards those of this process."""
    grads = [p.grad for optimizer in optimizers for p in parameters_of(optimizer)]
    return [None if grad is None else local(grad) for grad in grads]


def set_gradients(optimizers: Iterable[Optimizer], gradients: Sequence[Tensor | None]) -> None:
    """Set copies of gradients that `gradients_of` returned; parameters without one keep theirs.

    Raises:
        CheckpointError: the gradients belong to other parameters.
    """
    parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    shapes = [(local(p).shape, g.shape) for p, g in zip(parameters, gradients, strict=False) if g is not None]
    if len(parameters) != len(gradients) or any(wanted != saved for wanted, saved in shapes):
        raise CheckpointError(
            "the checkpoint has gradients of other parameters; resume the saved module with its optimizers"
        )
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = shards_like(gradient.to(local(parameter), copy=True), parameter)


def saved_window(optimizer: Optimizer, state_dict: Mapping[str, Any], *, continues: bool) -> dict[Tensor, Tensor]:
    """Return the gradients of an open window that a `StepInBackward` saved, by parameter.

    Args:
        optimizer: the optimizer that loads the state dict.
        state_dict: of any optimizer; most have no window.
        continues: whether the window can be continued; otherwise a warning says that its gradients are dropped.

    Raises:
        CheckpointError: the gradients belong to other parameters.
    """
    saved = state_dict.get("window", {})
    if saved and not continues:
        warn_of_dropped_window()
        return {}
    parameters = parameters_of(optimizer)
    shapes = {number: p.shape for number, p in enumerate(parameters)}
    if any(shapes.get(number) != sums.shape for number, sums in saved.items()):
        raise CheckpointError(
            f"the optimizer's state has gradients of a window for {len(saved)} parameters, which are not among the"
            f" {len(parameters)} here; load it into an optimizer of the module that was saved"
        )
    return {parameters[number]: sums for number, sums in saved.items()}


def warn_of_dropped_window() -> None:
    """Warn that the gradients of a checkpoint's open window are dropped; Python shows it once."""
    warnings.warn(
        "the checkpoint was saved before the last micro-batch of an optimizer step, and the gradients of that step so"
        " far are dropped: this run can't continue them; resume with the preset, precision and"
        " accumulate_grad_batches of the run that saved it, or from a checkpoint that was saved after a step",
        stacklevel=1,  # the same place for all callers
    )
