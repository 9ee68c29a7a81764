"""Checks of an optimizer's gradients, with errors that name the parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import GradientError, RefusedStepError
from lightning_solo.memory.sharded_tensors import local
from lightning_solo.optim.operator_kernels import all_finite, real_parts
from lightning_solo.optim.param_groups import name_in


def require_dense(optimizer: Optimizer, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Check that no gradient of an optimizer's parameters is sparse."""
    for p, grad in gradients:
        if grad.is_sparse:
            raise GradientError(
                f"the gradient of {name_in(optimizer, p)} is sparse; write nn.Embedding(..., sparse=False)"
            )


def require_finite(
    optimizer: Optimizer, gradients: Iterable[tuple[Tensor, Tensor]], losses: Tensor | None = None
) -> None:
    """Check that no gradient of an optimizer's parameters is sparse, infinite or NaN; waits for the device once."""
    pairs = list(gradients)
    require_dense(optimizer, pairs)
    full = [local(g) for _, g in pairs if local(g).numel()] + ([] if losses is None else [losses])
    if full and not bool(all_finite(full)):
        raise first_not_finite(optimizer, pairs)


def first_not_finite(optimizer: Optimizer, gradients: Iterable[tuple[Tensor, Tensor]]) -> RefusedStepError:
    """Return the error that names the first parameter whose gradient isn't finite; without one it was a loss."""
    for p, gradient in gradients:
        if not bool(local(gradient).isfinite().all()):
            return not_finite(optimizer, p)
    return RefusedStepError("a loss is not finite; no weight has been touched")


_ONE = torch.ones(())
LARGE = 2**17
"""Elements from which the sum of a gradient on a CPU is faster than a look at all of them at once."""


def found_non_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Return a number above 0 if an element of dense gradients isn't finite, else 0; doesn't wait for a device.

    On a CPU a large gradient counts as not finite if its sum isn't.
    """
    device = gradients[0].device
    if device.type != "cpu":
        norms: Sequence[Tensor] = torch._foreach_norm([g for g in gradients if g.numel()], math.inf)
        return torch.stack([norm.float() for norm in norms]).isfinite().all().logical_not().float()
    gradients = [*map(real_parts, gradients)]
    found, small = torch.zeros(()), gradients
    if max(map(Tensor.numel, gradients)) >= LARGE:
        small = [gradient for gradient in gradients if gradient.numel() < LARGE]
        for gradient in gradients:
            found += gradient.sum().isfinite().logical_not() if gradient.numel() >= LARGE else 0
    torch._amp_foreach_non_finite_check_and_unscale_(small, found, _ONE)  # times 1: they stay to the bit
    return found


def not_finite(
    optimizer: Optimizer,
    parameter: Tensor,
    consequence: str = "no weight has been touched",
    *,
    touched: bool = False,
) -> RefusedStepError:
    """Return the error of a parameter whose gradient isn't finite; ``touched`` if weights have been changed."""
    message = f"the gradient of {name_in(optimizer, parameter)} is not finite; {consequence}"
    return RefusedStepError(message, touched=touched)
