"""Step single parameters in backward, and record whether their gradients were finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.gradient_checks import not_finite
from lightning_solo.optim.operator_kernels import greatest
from lightning_solo.optim.torch_optimizers import stepper

WAITING_BYTES = 2**25
"""Bytes of small gradients that wait in backward for a common launch."""


class ImmediateSteps:
    """The parameters that have been stepped in this window, one by one.

    Args:
        optimizer: a `CompactAdamW`, or a torch optimizer that steps each parameter by itself.

    Raises:
        ConflictError: the optimizer isn't known to step each parameter by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.step_one = stepper(optimizer)
        self._optimizer = optimizer
        self._compact = optimizer if isinstance(optimizer, CompactAdamW) else None
        self._stepped: dict[Tensor, Tensor | None] = {}  # with the largest magnitude of the gradient, if it is measured
        self._waiting: list[tuple[Tensor, Tensor]] = []  # small ones, to be stepped together
        self._waiting_bytes = 0  # of their gradients

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._stepped

    def step(self, parameter: Tensor, gradient: Tensor, bound: float) -> None:
        """Step a parameter with its gradient clamped to a bound, or queue it for a launch with others.

        Raises:
            GradientError: the gradient is infinite or NaN, if that is known without waiting for a device.
        """
        self._stepped[parameter] = None
        compact = self._compact
        if compact is not None and compact.kernels.folds:  # a step notes by itself what wasn't finite
            if gradient.numel() >= compact.kernels.grouped_below:
                compact.step_many([(parameter, gradient)], compact.control(bound=bound))
                return
            self._waiting.append((parameter, gradient))
            self._waiting_bytes += gradient.nbytes
            if self._waiting_bytes > WAITING_BYTES:
                self._step_waiting(compact, bound)
            return
        if gradient.numel():
            largest = greatest([gradient])[0].float()
            if not largest.is_cuda and bool(largest.isfinite().logical_not()):  # False in a plan
                before = len(self._stepped) - 1
                self._stepped.clear()
                touched = f"{before} parameters before it have been stepped" if before else "no weight has been touched"
                raise not_finite(self._optimizer, parameter, touched)
            self._stepped[parameter] = largest if largest.is_cuda else None  # on a GPU the host would wait, each time
        if compact is not None:
            compact.step_many([(parameter, gradient)], compact.control(bound=bound))
        else:
            self.step_one(parameter, clamped(gradient, bound), 1.0)

    def finish(self, bound: float) -> None:
        """End the window: step the queued parameters.

        Raises:
            GradientError: a gradient was infinite or NaN.
        """
        if self._waiting and self._compact is not None:
            self._step_waiting(self._compact, bound)
        stepped, self._stepped = self._stepped, {}
        first = None
        on_device = {p: largest for p, largest in stepped.items() if largest is not None}
        if on_device and bool(torch.stack([*on_device.values()]).isfinite().logical_not().any()):
            first = next(p for p, largest in on_device.items() if not bool(largest.isfinite()))
        elif self._compact is not None and self._compact.kernels.folds and stepped:
            first = self._compact.first_not_finite()
        if first is not None:
            raise not_finite(
                self._optimizer,
                first,
                "it and others have been stepped: resume from a checkpoint; with gradient_clip_val=1.0 (max_norm=1.0 of"
                " StepInBackward) gradients are kept and checked before any step",
            )

    def forget(self) -> None:
        """Drop the gradients of queued parameters, and the record of stepped ones."""
        if self._stepped and self._compact is not None:
            self._compact.forget_not_finite()
        self._stepped.clear()
        self._waiting.clear()
        self._waiting_bytes = 0

    def _step_waiting(self, compact: CompactAdamW, bound: float) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        compact.step_many(waiting, compact.control(bound=bound))


def clamped(gradient: Tensor, bound: float) -> Tensor:
    """Return a gradient clamped in fp32, since bf16 rarely represents the bound; an fp32 gradient changes in place."""
    if bound == math.inf:
        return gradient
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).clamp_(-bound, bound)
