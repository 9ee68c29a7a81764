"""Bounds-check index tensors, which fake tensors skip and a real run fails on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from lightning_solo.errors import PlanError

aten = torch.ops.aten


def check_indices(func: Any, args: tuple[Any, ...]) -> None:
    """Look at the indices of one operator, where their numbers are known: those of a batch, and made of it alone.

    Raises:
        PlanError: one is out of range.
    """
    choices = CHOICES.get(func)
    for indices, least, count, ignored in choices(*args) if choices is not None else ():
        numbers = indices.constant if isinstance(indices, FakeTensor) else None
        if numbers is None:
            continue
        with no_dispatch():
            wrong = numbers[((numbers < least) | (numbers >= count)) & (numbers != ignored)].tolist()[:1]
        if wrong:
            raise PlanError(
                f"{func.name()}: an index of {wrong[0]} in the batch, of which there are {count}"
                f" ({least} to {count - 1}); a real run ends there"
            )


Choice = tuple[Tensor, int, int, int]
"""Indices, the least of them allowed, of how many they are, and one that is passed over."""


NONE = -(2**63)


def _embedding(weight: Tensor, indices: Tensor, *rest: Any) -> Iterator[Choice]:
    yield indices, 0, weight.shape[0], NONE


def _nll_loss(
    scores: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int, *rest: Any
) -> Iterator[Choice]:
    yield target, 0, scores.shape[1 if scores.dim() > 1 else 0], ignored


def _along(tensor: Tensor, dim: int, indices: Tensor, *rest: Any) -> Iterator[Choice]:
    yield indices, 0, tensor.shape[dim] if tensor.dim() else 1, NONE


def _index(tensor: Tensor, indices: Any, *rest: Any) -> Iterator[Choice]:
    if any(isinstance(i, Tensor) and i.dtype in _MASKS for i in indices):
        return  # a mask stands for several dimensions
    for dim, given in enumerate(indices):
        if isinstance(given, Tensor):
            yield given, -tensor.shape[dim], tensor.shape[dim], NONE


_MASKS = (torch.bool, torch.uint8)
CHOICES: dict[Any, Callable[..., Iterator[Choice]]] = {
    aten.embedding.default: _embedding,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.gather.default: _along,
    aten.scatter.src: _along,
    aten.scatter.value: _along,
    aten.scatter_.src: _along,
    aten.scatter_.value: _along,
    aten.scatter_add.default: _along,
    aten.scatter_add_.default: _along,
    aten.index_select.default: _along,
    aten.index.Tensor: _index,
}
