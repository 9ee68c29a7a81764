"""Bounds checks of index tensors, which fake tensors skip and on which a real run fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from lightning_solo.errors import PlanError
from lightning_solo.planner.data_dependent_ops import is_mask

aten = torch.ops.aten


def check_indices(func: Any, args: tuple[Any, ...]) -> None:
    """Check one operator's indices if their numbers are known: in a batch, and in values computed only from it.

    Raises:
        PlanError: an index is out of range.
    """
    bounds = BOUNDS.get(func)
    for indices, least, count, ignored in bounds(*args) if bounds is not None else ():
        numbers = indices.constant if isinstance(indices, FakeTensor) else None
        if numbers is None:
            continue
        with no_dispatch():
            wrong = numbers[((numbers < least) | (numbers >= count)) & (numbers != ignored)].tolist()[:1]
        if wrong:
            raise PlanError(
                f"{func.name()}: an index of {wrong[0]} in the batch, where there are {count} ({least} to {count - 1});"
                " a real run fails there"
            )


Bounds = tuple[Tensor, int, int, int]
"""Indices, the smallest allowed one, the size that they index, and an ignored index."""

NONE = -(2**63)


def _nll_loss(
    scores: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int, *rest: Any
) -> Iterator[Bounds]:
    yield target, 0, scores.shape[1 if scores.dim() > 1 else 0], ignored


def _along(tensor: Tensor, dim: int, indices: Tensor, *rest: Any) -> Iterator[Bounds]:
    yield indices, 0, tensor.shape[dim] if tensor.dim() else 1, NONE


def _index(tensor: Tensor, indices: Any, *rest: Any) -> Iterator[Bounds]:
    if any(map(is_mask, indices)):
        return
    for dim, index in enumerate(indices):
        if isinstance(index, Tensor):
            yield index, -tensor.shape[dim], tensor.shape[dim], NONE


SCATTERS = (aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value)
ADDING_SCATTERS = (aten.scatter_add.default, aten.scatter_add_.default)
BOUNDS: dict[Any, Callable[..., Iterator[Bounds]]] = {
    aten.embedding.default: lambda weight, indices, *rest: _along(weight, 0, indices),
    aten.index.Tensor: _index,
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _nll_loss),
    **dict.fromkeys((aten.gather.default, aten.index_select.default, *SCATTERS, *ADDING_SCATTERS), _along),
}
INDEXED = frozenset(
    (*BOUNDS, aten.embedding_dense_backward.default, aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
) - {aten.index.Tensor}
"""Operators whose results have sizes that don't depend on the numbers of their indices."""
