"""Checks of an optimizer's gradients, with errors that name the parameter."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import GradientError, RefusedStepError
from lightning_solo.optim.operator_kernels import all_finite
from lightning_solo.optim.param_groups import name_in


def require_dense(optimizer: Optimizer, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Check that no gradient of an optimizer's parameters is sparse.

    Raises:
        GradientError: one is; names it.
    """
    for p, grad in gradients:
        if grad.is_sparse:
            raise GradientError(
                f"the gradient of {name_in(optimizer, p)} is sparse; write nn.Embedding(..., sparse=False)"
            )


def require_finite(optimizer: Optimizer, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Check that no gradient of an optimizer's parameters is sparse, infinite or NaN; waits for the device once.

    Raises:
        GradientError: one is sparse, or a `RefusedStepError`: one is infinite or NaN; names the first.
    """
    pairs = list(gradients)
    require_dense(optimizer, pairs)
    full = [g for _, g in pairs if g.numel()]
    if not full or bool(all_finite(full)):
        return
    first = next(p for p, g in pairs if not bool(g.isfinite().all()))
    raise not_finite(optimizer, first)


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
