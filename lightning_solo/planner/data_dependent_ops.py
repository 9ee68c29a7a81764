"""Results of data-dependent operators for fake tensors; each is an assumption that the plan names.

Operators on a batch, or on values computed only from it, have data and run as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from lightning_solo.attributes import replaced

aten = torch.ops.aten
Assume = Callable[[str], None]


def is_mask(index: Any) -> bool:
    """Return whether an index is a mask, which may cover several dimensions."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


MASK = "a mask or nonzero takes every element"


def item(assume: Assume, tensor: Tensor) -> Any:
    """Return 1 for a number that is read from a tensor, and False for a condition."""
    assume("a number read from a tensor (.item(), if, int()) is 1, a condition is False")
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def nonzero(assume: Assume, tensor: Tensor) -> Tensor:
    """Return as many indices as there are elements, as if none were zero."""
    assume(MASK)
    return tensor.new_zeros((tensor.numel(), tensor.dim()), dtype=torch.int64)


def masked_select(assume: Assume, tensor: Tensor, mask: Tensor) -> Tensor:
    """Return as many elements as there are, as if the mask were true everywhere."""
    assume(MASK)
    return tensor.new_empty(torch.broadcast_tensors(tensor, mask)[0].numel())  # type: ignore[no-untyped-call]


def index(assume: Assume, tensor: Tensor, indices: Any) -> Any:
    """Index as if every mask were true everywhere; return ``NotImplemented`` if no index is a mask."""
    if not any(map(is_mask, indices)):
        return NotImplemented
    expanded: list[Any] = []
    for i in indices:
        expanded += nonzero(assume, i).unbind(1) if is_mask(i) else [i]
    return aten.index.Tensor(tensor, expanded)


def index_put(assume: Assume, tensor: Tensor, indices: Any, values: Tensor, *rest: Any) -> Any:
    """Return the tensor, written in place, as if every mask were true everywhere; see `index`."""
    if not any(map(is_mask, indices)):
        return NotImplemented
    assume(MASK)
    return tensor


def bincount(assume: Assume, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Count into ``minlength`` bins, or as many as there are elements."""
    if not minlength:
        assume("bincount has as many bins as there are elements")
    dtype = torch.int64
    if weights is not None:  # sums are in fp32 or fp64
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    return tensor.new_zeros(minlength or tensor.numel(), dtype=dtype)


def unique(
    assume: Assume, tensor: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all elements, as if they all differed."""
    assume("unique finds no element twice")
    inverse = tensor.new_zeros(tensor.shape if return_inverse else 0, dtype=torch.int64)
    counts = tensor.new_zeros(tensor.numel() if return_counts else 0, dtype=torch.int64)
    return tensor.new_empty(tensor.numel()), inverse, counts


def unique_consecutive(
    assume: Assume, tensor: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return all elements, as if no neighbours were equal."""
    if dim is not None:
        return unique_dim(assume, tensor, dim)
    return unique(assume, tensor, True, return_inverse, return_counts)


def unique_dim(assume: Assume, tensor: Tensor, dim: int, *rest: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return all slices, as if they all differed."""
    assume("unique finds no element twice")
    counts = tensor.new_zeros(tensor.shape[dim], dtype=torch.int64)
    return torch.empty_like(tensor), counts, counts.clone()


def equal(assume: Assume, first: Tensor, second: Tensor) -> bool:
    """Return whether the shapes are equal."""
    assume("two tensors that are compared as a whole are equal")
    return first.shape == second.shape


def repeat_interleave(assume: Assume, repeats: Tensor, output_size: int | None = None) -> Tensor:
    """Repeat each element once if no size is given."""
    if output_size is None:
        assume("repeat_interleave repeats each element once")
    return repeats.new_zeros(repeats.numel() if output_size is None else output_size, dtype=torch.int64)


def grouped_mm(assume: Assume, first: Tensor, second: Tensor, offs: Tensor | None = None, *rest: Any, **kw: Any) -> Any:
    """Multiply groups in fp32, which torch refuses for fake tensors; return ``NotImplemented`` in bf16."""
    if first.dtype is torch.bfloat16 and second.dtype is torch.bfloat16:
        return NotImplemented
    if first.dim() == 2 and second.dim() == 2 and offs is not None:
        return first.new_empty(offs.shape[0], first.shape[0], second.shape[1])
    rows = first.shape[:-1] if second.dim() == 3 else first.shape[-2:-1]
    return first.new_empty(*rows, second.shape[-1])


def ctc_loss(
    assume: Assume, log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any, **kw: Any
) -> Any:
    """Return the loss of each example, and for backward 2 x the longest target + 1 numbers per time step."""
    longest = targets.shape[-1]
    if (numbers := getattr(lengths, "constant", None)) is not None:
        longest = int(numbers.max())
    elif isinstance(lengths, Tensor):
        assume("targets of a CTC loss have the largest possible length")
    else:
        longest = max(lengths)
    steps, examples = log_probs.shape[:2]
    return log_probs.new_empty(examples), log_probs.new_empty(examples, steps, 2 * longest + 1)


def ctc_loss_backward(assume: Assume, grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    """Return a gradient with the shape of ``log_probs``."""
    return torch.empty_like(log_probs)


DATA_DEPENDENT: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: item,
    aten.nonzero.default: nonzero,
    aten.masked_select.default: masked_select,
    aten.index.Tensor: index,
    aten.index_put_.default: index_put,
    aten.bincount.default: bincount,
    aten._unique2.default: unique,
    aten.unique_dim.default: unique_dim,
    aten.unique_consecutive.default: unique_consecutive,
    aten.equal.default: equal,
    aten.repeat_interleave.Tensor: repeat_interleave,
    aten._grouped_mm.default: grouped_mm,
    aten._ctc_loss.default: ctc_loss,
    aten._ctc_loss.Tensor: ctc_loss,
    aten._ctc_loss_backward.default: ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: ctc_loss_backward,
}


@contextmanager
def arrays_of_zeros(assume: Assume) -> Iterator[None]:
    """Make ``.numpy()`` and ``.tolist()`` of a fake tensor return its numbers if known, else zeros."""
    numpy = torch.Tensor.numpy

    def zeros(tensor: Tensor, *, force: bool = False) -> Any:
        if not isinstance(tensor, FakeTensor):
            return numpy(tensor, force=force)
        if tensor.constant is not None:
            with no_dispatch():
                return numpy(tensor.constant, force=force).copy()
        assume(".numpy() and .tolist() return zeros")
        return np.zeros(tuple(tensor.shape), dtype=_NUMPY.get(tensor.dtype, np.float32))

    # torch's own tolist for fake tensors reads number by number
    tolist = replaced(FakeTensor, "tolist", lambda tensor: zeros(tensor).tolist())
    with replaced(torch.Tensor, "numpy", zeros), tolist:
        yield


_EXACT = ("float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_NUMPY = {getattr(torch, name): np.dtype(name) for name in _EXACT}
