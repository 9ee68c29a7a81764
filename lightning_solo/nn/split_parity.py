"""Compare the loss of a whole batch with the mean over its parts, in forwards without dropout."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_solo.attributes import replaced

RUNS = 5  # at which two equal normal distributions are told apart by chance in 4 of 100,000 cases


def is_mean(loss: float, terms: Sequence[float], tolerance: float) -> bool:
    """Return whether a batch's loss is the sum of its parts' terms, within a tolerance relative to the larger one."""
    return abs(loss - sum(terms)) <= tolerance * max(abs(loss), sum(map(abs, terms)), 1e-4)


def mismatch(
    whole: Callable[[int], float | None], split: Callable[[int], Sequence[float] | None], tolerance: float
) -> tuple[float, Sequence[float]] | None:
    """Return the loss of a batch and the terms of its parts if their sum differs by more than rounding; else None.

    If they depend on random numbers, they are computed `RUNS` times, and differ if the gap between the two is larger
    than the range of each. A loss that isn't finite is not compared.

    Args:
        whole: returns the loss of the whole batch for a seed; None if it has none.
        split: returns the loss of each part, multiplied by its share in the mean; None if a part has none.
        tolerance: of rounding, relative.

    >>> mismatch(lambda seed: 2.0, lambda seed: [0.5, 1.5], tolerance=1e-3)
    >>> mismatch(lambda seed: 2.0, lambda seed: [0.5, 1.0], tolerance=1e-3)
    (2.0, [0.5, 1.0])
    """
    losses, sums = [], []
    for seed in range(RUNS):
        loss, terms = whole(seed), split(seed)
        if loss is None or terms is None or not math.isfinite(loss):
            return None
        if seed == 0:
            first = loss, terms
            if is_mean(loss, terms, tolerance):
                return None
        if not math.isfinite(sum(terms)):
            return first
        losses.append(loss)
        sums.append(sum(terms))
        if seed == 1 and losses[0] == losses[1] and sums[0] == sums[1]:
            return first  # no random numbers
    gap = max(min(losses) - max(sums), min(sums) - max(losses))
    return first if gap > max(max(losses) - min(losses), max(sums) - min(sums)) else None


def close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape differ by rounding at most, of 16 bits under autocast."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = 2e-2 if one.dtype.itemsize < 4 or torch.is_autocast_enabled(one.device.type) else 1e-3
    scale = one.detach().float().nan_to_num(0, 0, 0).abs().max().item() if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=tolerance * scale, equal_nan=True)


SHARPER = 256.0
"""Factor of the logits of sharpened cross entropies."""


class _WithoutDropout(TorchFunctionMode):
    """Makes functions that drop elements return all of them; sharpens cross entropies."""

    def __init__(self, sharpened: bool) -> None:
        super().__init__()
        self._sharpened = sharpened

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        elif func is F.cross_entropy and self._sharpened and args:
            args = (args[0] * SHARPER, *args[1:])
        elif "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def same_for_parts(module: nn.Module, *, sharpened: bool = False) -> Iterator[None]:
    """Turn off dropout and BatchNorm's statistics of the batch, which differ between a batch and its parts.

    ``sharpened`` multiplies the logits of each cross entropy by `SHARPER`. Without it the losses of all tokens are
    nearly the same in a model that hasn't been trained, and so are their means by any weights.

    Modules stay in training mode, but for BatchNorm and for those without children, parameters and buffers. Compiled
    functions run uncompiled.
    """
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
                stack.enter_context(replaced(part, "dropout", 0.0))
            elif isinstance(part, nn.modules.batchnorm._BatchNorm) or not (
                part._modules or part._parameters or part._buffers
            ):
                stack.enter_context(replaced(part, "training", False))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled yet; sizes that don't come again are not worth it
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_WithoutDropout(sharpened))
        yield
