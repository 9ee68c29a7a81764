"""Compute the tensors that a forward saves for backward again there, as ``torch.utils.checkpoint`` does at more cost.

A step of a small model waits for the host, so the host's work for each block and each saved tensor counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class RecomputedTensors:
    """A context in which forward saves places instead of tensors; backward fills them by a second forward.

    The first place that backward takes a tensor from starts the second forward. It fills all places that a graph still
    holds, and stops at the last. Backward takes each tensor out of its place, so its memory is freed as without
    recomputation. A place that another backward pass finds empty has all filled once more.

    Args:
        again: the second forward, a function of ``tensors``.
        tensors: inputs, kept as autograd keeps tensors: under the hooks of outer contexts, and an in-place change is an
            error in backward.
        whole: whether the second forward runs to its end.
        different: returns the error for a second forward that saves other tensors.
    """

    def __init__(
        self,
        again: Callable[..., Any],
        tensors: Sequence[Tensor],
        whole: bool,
        different: Callable[[], Exception],
    ) -> None:
        self._again, self._whole, self._different = again, whole, different
        # the result, since torch before 2.13 frees what its grad_fn has saved when nothing else refers to the result
        self._inputs: Tensor = _Inputs.apply(_ANCHOR, *tensors)  # type: ignore[no-untyped-call]
        self._places: list[ref[_Place]] = []
        self._is_complete = False
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        del self._hooks  # it refers to this object
        self._is_complete = True

    def _pack(self, tensor: Tensor) -> _Place:
        place = _Place()
        place.kind, place.tensor = (tensor.shape, tensor.dtype, tensor.device), None
        self._places.append(ref(place))
        return place

    def _unpack(self, place: _Place) -> Tensor:
        if place.tensor is None:
            self._fill()
        tensor, place.tensor = place.tensor, None
        if tensor is None:
            raise self._different()
        return tensor

    def _fill(self) -> None:
        places = self._places
        last = len(places)
        # a block that differentiates in its forward needs what was saved so far
        stops = not (self._whole and self._is_complete)
        number = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal number
            if number == last:
                raise self._different()
            if tensor.requires_grad:
                tensor = tensor.detach()  # without its graph
            place = places[number]()
            if place is not None:
                if place.kind != (tensor.shape, tensor.dtype, tensor.device):
                    raise self._different()
                place.tensor = tensor
            number += 1
            if stops and number == last:
                raise _Filled
            return tensor

        try:
            with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
                node: Any = self._inputs.grad_fn
                self._again(*node.saved_tensors[1:])
        except _Filled:
            return
        if number != last:
            raise self._different()


class _Place:
    """What a graph holds instead of a saved tensor."""

    __slots__ = ("__weakref__", "kind", "tensor")

    kind: tuple[torch.Size, torch.dtype, torch.device]
    tensor: Tensor | None


class _Filled(Exception):  # noqa: N818 - ends a forward, and is no error
    """Ends a second forward, since all places are filled."""


class _Inputs(torch.autograd.Function):
    """A node of a graph that saves tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(anchor, *tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("nothing is computed from it")


_ANCHOR = torch.empty(0, requires_grad=True)  # so that the node exists if no input needs a gradient
