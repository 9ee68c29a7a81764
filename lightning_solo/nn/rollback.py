"""What forward and backward change besides gradients, put back: random numbers, buffers, states of metrics."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError


class Rollback:
    """Puts a module and the random numbers back to where they were at the last `save`.

    Copied are the state of the random numbers of torch (on the CPU and on ``device``), Python and, where it is
    imported, NumPy, the states of metrics of torchmetrics, and buffers. Of the buffers all are copied once, and from
    then on those that change: masks and tables of positions are large, and never do.

    >>> module = nn.BatchNorm1d(2)
    >>> rollback = Rollback(module, torch.device("cpu")); rollback.save()
    >>> _ = module(torch.randn(4, 2)); rollback.restore()
    >>> module.running_mean, module.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._buffers = [_Buffer(part, name, path) for path, part in module.named_modules() for name in part._buffers]
        self._metrics = [part for part in module.modules() if isinstance(getattr(part, "_defaults", None), dict)]
        self._undo: list[Callable[[], None]] = []

    def save(self) -> None:
        """Remember how things are now."""
        self._undo = [*map(_saved_metric, self._metrics)]
        for buffer in self._buffers:
            buffer.save()
        generators: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
        ]
        if self._device.type in ("cuda", "xpu"):
            back_end, device = getattr(torch, self._device.type), self._device
            generators.append(
                (lambda: back_end.get_rng_state(device), lambda state: back_end.set_rng_state(state, device))
            )
        elif self._device.type == "mps":
            generators.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
        if (numpy := sys.modules.get("numpy")) is not None:
            generators.append((numpy.random.get_state, numpy.random.set_state))
        for get, put in generators:
            self._undo.append(partial(put, get()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back; it may be restored several times.

        Raises:
            ConflictError: a buffer changed for the first time since it was last copied.
        """
        for undo in self._undo:
            undo()
        for buffer in self._buffers:
            buffer.restore()


_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that kernels of batch norm write without counting a version of the tensor."""


class _Buffer:
    """One buffer of a module, with a copy unless it has never changed."""

    def __init__(self, owner: nn.Module, name: str, path: str) -> None:
        self._owner, self._name = owner, name
        self.path = f"{path}.{name}" if path else name
        self._tensor: Tensor | None = None
        self._version = -1
        self._copy: Tensor | None = None
        self._changes: bool | None = None  # not known before the second save

    def _is_as_saved(self) -> bool:
        if self._name in _UNCOUNTED:
            return False
        tensor = self._owner._buffers.get(self._name)
        return tensor is self._tensor and (tensor is None or tensor._version == self._version)

    def save(self) -> None:
        if self._changes is False and self._is_as_saved():  # most of them, each time
            return
        if self._version >= 0:
            self._changes = bool(self._changes) or not self._is_as_saved()
        tensor = self._owner._buffers.get(self._name)
        self._tensor, self._version = tensor, 0 if tensor is None else tensor._version
        self._copy = None if tensor is None or self._changes is False else tensor.clone()

    def restore(self) -> None:
        if self._is_as_saved():
            return
        if self._tensor is not None and self._copy is None:
            raise ConflictError(
                f"{self.path} changed in a step that ran out of memory, for the first time, and can't be put back:"
                " resume from the last checkpoint with a smaller micro-batch"
            )
        if self._tensor is not None and self._copy is not None:
            self._tensor.copy_(self._copy)
            self._version = self._tensor._version
        self._owner._buffers[self._name] = self._tensor
        self._changes = True


_METRIC_ATTRIBUTES = (
    *("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced"),
    *("_to_sync", "_should_unsync", "_enable_grad", "compute_on_cpu"),  # a forward that fails leaves those of one batch
)


def _saved_metric(metric: Any) -> Callable[[], None]:
    """Return what puts a torchmetrics metric back: sums that it adds to in place, and lists that it appends to."""
    names = [*metric._defaults, *_METRIC_ATTRIBUTES]
    saved = {name: vars(metric)[name] for name in names if name in vars(metric)}

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value

    copies = {name: copied(value) for name, value in saved.items()}

    def undo() -> None:
        for name, value in copies.items():
            vars(metric)[name] = copied(value)

    return undo
