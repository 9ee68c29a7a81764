"""Step parameters in backward, small ones together, and record whether their gradients were finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.memory.sharded_tensors import local
from lightning_solo.optim import kernels
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.gradient_checks import not_finite
from lightning_solo.optim.kernels import Kernels
from lightning_solo.optim.operator_kernels import all_finite, greatest
from lightning_solo.optim.torch_optimizers import Pairs, stepper


class ImmediateSteps:
    """The parameters that have been stepped in this window: large ones at once, small ones together.

    Args:
        optimizer: a `CompactAdamW`, or a torch optimizer that steps each parameter by itself.
        option: the path of the technique that steps it, for messages.

    Raises:
        ConflictError: the optimizer isn't known to step each parameter by itself.
    """

    def __init__(self, optimizer: Optimizer, option: str) -> None:
        self.step_pairs = stepper(optimizer, option)
        self._optimizer = optimizer
        self._compact = optimizer if isinstance(optimizer, CompactAdamW) else None
        self._kernels: dict[torch.device, Kernels] = {}
        self._stepped: dict[Tensor, Tensor | None] = {}  # with the largest magnitude of the gradient, if it is measured
        self.scale: Tensor | None = None  # of the gradients of this window
        self._waiting: list[tuple[Tensor, Tensor]] = []  # small ones, to be stepped together
        self._waiting_bytes = 0  # of their gradients

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._stepped

    def step(self, parameter: Tensor, gradient: Tensor, bound: float) -> None:
        """Step a parameter with its gradient clamped to a bound, or queue it for a step with others.

        Raises:
            GradientError: a gradient is infinite or NaN, if that is known without waiting for a device.
        """
        self._stepped[parameter] = None
        here = self.kernels_of(gradient.device)
        if gradient.numel() >= here.grouped_below:
            self._step([(parameter, gradient)], bound)
            return
        self._waiting.append((parameter, gradient))
        self._waiting_bytes += gradient.nbytes
        if self._waiting_bytes > here.grouped_bytes:
            self.flush(bound)

    def finish(self, bound: float) -> None:
        """End the window: step the queued parameters.

        Raises:
            GradientError: a gradient was infinite or NaN.
        """
        self.flush(bound)
        self.scale = None
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
                touched=True,
            )

    def forget(self) -> None:
        """Drop the gradients of queued parameters, and the record of stepped ones."""
        if self._stepped and self._compact is not None:
            self._compact.forget_not_finite()
        self._stepped.clear()
        self._waiting.clear()
        self._waiting_bytes = 0

    def kernels_of(self, device: torch.device) -> Kernels:
        """Return the kernels of a device; they say which gradients are small."""
        if self._compact is not None:
            return self._compact.kernels
        if device not in self._kernels:
            self._kernels[device] = kernels.kernels_on(device)
        return self._kernels[device]

    def flush(self, bound: float) -> None:
        """Step the queued parameters."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            self._step(waiting, bound)

    @torch.no_grad()
    def _step(self, pairs: Pairs, bound: float) -> None:
        compact = self._compact
        if compact is None or not compact.kernels.folds:  # else a step records by itself what wasn't finite
            self._check(pairs)
        if compact is not None:
            compact.step_many(pairs, compact.control(self.scale, bound))
        else:
            factor = None if self.scale is None else float(self.scale)
            self.step_pairs([(p, clamped(gradient, bound)) for p, gradient in pairs], factor)

    def _check(self, pairs: Pairs) -> None:
        """Refuse gradients that aren't finite on a CPU; record the largest magnitude of others, without waiting."""
        full = [(p, local(gradient)) for p, gradient in pairs if local(gradient).numel()]
        on_device = [pair for pair in full if pair[1].is_cuda]
        for (p, _), largest in zip(on_device, greatest([gradient for _, gradient in on_device]), strict=True):
            self._stepped[p] = largest.float()
        on_host = [gradient for _, gradient in full if not gradient.is_cuda]
        if on_host and bool(all_finite(on_host).logical_not()):  # False in a plan
            first = next(p for p, gradient in full if not bool(gradient.isfinite().all()))
            before = len(self._stepped) - len(pairs) - len(self._waiting)
            self.forget()
            touched = f"{before} parameters before it have been stepped" if before else "no weight has been touched"
            raise not_finite(self._optimizer, first, touched, touched=before > 0)


def clamped(gradient: Tensor, bound: float) -> Tensor:
    """Return a gradient clamped in fp32, since bf16 rarely represents the bound; an fp32 gradient changes in place."""
    if bound == math.inf:
        return gradient
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)).clamp_(-bound, bound)
