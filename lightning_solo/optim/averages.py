"""Averages of weights in fp32: exponential (EMA), or the equal mean (SWA), on the host or beside the weights.

The first update takes the weights as they are, so the average needs no correction of a bias towards zero. Later ones
move it towards them by ``1 - decay``, or by one over the number of updates: ``average.lerp_(weight, share)``, as
`torch.optim.swa_utils.AveragedModel` does in fp32.

With the average on the host and the weights on a GPU, an update copies the weights to pinned memory on a stream of its
own, and a thread adds them to the average. Both run while the GPU computes the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_solo.memory.host_slabs import host_tensors, is_planned, require_host_room
from lightning_solo.optim.memory_order import is_dense
from lightning_solo.optim.split_weights import joined

AVERAGE = "averaged_weights"
"""Attribute of a callback, and key of its state in a checkpoint, with the average by name."""
MEMBERS = "members"
"""Key of a callback's state in a checkpoint, with a list of weights by name."""


def averaged_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the average in a checkpoint, by name; empty if it has none."""
    states = checkpoint.get("callbacks", {}).values()
    return {
        name: each for state in states if isinstance(state, Mapping) for name, each in state.get(AVERAGE, {}).items()
    }


@dataclass
class Cycle:
    """Where cycles of a learning rate end: when it rises after it has fallen.

    >>> cycle = Cycle()
    >>> [cycle.ends(rate) for rate in (0.1, 0.3, 0.2, 0.1, 0.1, 0.3, 0.2, 0.3)]
    [False, False, False, False, False, True, False, True]
    """

    rate: float | None = None
    falls: bool = False

    def ends(self, rate: float) -> bool:
        """Return whether the last rate ended a cycle, by the rate of the next step."""
        before, self.rate = self.rate, rate
        if before is None or rate == before:
            return False
        fell, self.falls = self.falls, rate < before
        return fell and not self.falls


class WeightSwap:
    """Averages in the place of parameters, whose own weights wait until `end`.

    Attributes:
        aside: parameter -> its own weight, and the version of the parameter while it has the average.
    """

    def __init__(self) -> None:
        self.aside: dict[Tensor, tuple[Tensor, int]] = {}

    @torch.inference_mode(False)  # a tensor made in a validation is used in training
    @torch.no_grad()
    def begin(self, averages: Iterable[tuple[Tensor, Tensor]], *, on_host: bool = True) -> None:
        """Put averages into parameters, and keep their own weights on the host or beside them; once until `end`."""
        for p, average in averages:
            if p not in self.aside:
                own = p.detach().to("cpu" if on_host else p.device, copy=True)
                p.copy_(average)
                self.aside[p] = own, p._version

    @torch.inference_mode(False)
    @torch.no_grad()
    def end(self) -> None:
        """Put the parameters' own weights back, to the bit; a second call does nothing."""
        for p, (own, _) in self.aside.items():
            p.copy_(own)
        self.aside.clear()

    def own(self, p: Tensor) -> Tensor:
        """Return a parameter's own weight, also while it has an average; a later change of the parameter is its own."""
        own, version = self.aside.get(p, (p, -1))
        return own if p._version == version else p.detach()


class Average:
    """The average of parameters.

    Args:
        method: "ema" or "swa".
        decay: of the exponential average, between 0 and 1.
        on_host: whether the average is stored on the host; else on each parameter's device.

    Attributes:
        values: name -> average, fp32, or float64 of float64 parameters; empty before the first update.
        updates: number of updates.
        members: weights that are kept beside the average, by name, the latest last.

    >>> average, weight = Average("swa", on_host=True), torch.zeros(2)
    >>> for _ in range(3): average.update({"weight": weight.add_(1)})
    >>> average.values["weight"]
    tensor([2., 2.])
    """

    def __init__(self, method: str, decay: float = 0.999, *, on_host: bool) -> None:
        self.method, self.decay, self.on_host = method, decay, on_host
        self.values: dict[str, Tensor] = {}
        self.members: list[dict[str, Tensor]] = []
        self.updates = 0
        self._forget()

    def _forget(self) -> None:
        self._stream: Any = None
        self._copied: Any = None  # event after the latest copies of weights
        self._buffers: dict[str, _Parts] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._adding: Future[None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        stays = ("method", "decay", "on_host", "values", "members", "updates")
        return {name: vars(self)[name] for name in stays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        vars(self).update(state)

    @property
    def share(self) -> float:
        """The part of the next update's weights in the average."""
        if not self.updates:
            return 1.0
        return 1 - self.decay if self.method == "ema" else 1 / (self.updates + 1)

    def update(self, parameters: Mapping[str, Tensor], corrections: Mapping[Tensor, Tensor] | None = None) -> None:
        """Add the weights of now.

        Args:
            parameters: by name.
            corrections: parameter -> correction of its bf16 weight, whose fp32 master weight is averaged.
        """
        self.settle()
        share, self.updates = self.share, self.updates + 1
        known = corrections or {}
        parts = {name: _Parts(p.detach(), known.get(p)) for name, p in parameters.items()}
        if not self._overlaps(parts):
            self._add(parts, share)
            return
        buffers = self._copy(parts)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "average")
        self._adding = self._thread.submit(self._add, buffers, share, self._copied)

    def begin(self, name: str, p: Tensor) -> None:
        """Add a parameter that was constant in all updates so far."""
        self.settle()
        if self.updates:
            self._add({name: _Parts(p.detach(), None)}, 1.0)

    @torch.no_grad()
    def _add(self, parts: Mapping[str, _Parts], share: float, copied: Any = None) -> None:
        if copied is not None:
            copied.synchronize()
        for name, (weight, correction) in parts.items():
            home = torch.device("cpu") if self.on_host else weight.device
            here = weight.to(home)
            if correction is None:
                master = here.to(torch.promote_types(weight.dtype, torch.float32))
            else:
                master = joined(here, correction)
            if name not in self.values or share == 1:
                self.values[name] = master.clone()
            else:
                self.values[name].lerp_(master, share)

    # --- copies that overlap ---

    def _overlaps(self, parts: Mapping[str, _Parts]) -> bool:
        on_gpu = any(part.weight.device.type == "cuda" for part in parts.values())
        return self.on_host and on_gpu and torch.cuda.is_available() and not is_planned()

    @torch.no_grad()
    def _copy(self, parts: Mapping[str, _Parts]) -> dict[str, _Parts]:
        """Begin to copy weights and corrections into pinned memory; return the copies."""
        device = next(part.weight.device for part in parts.values() if part.weight.device.type == "cuda")
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if missing := {name: part for name, part in parts.items() if name not in self._buffers}:
            self._buffers |= _buffers_of(missing, device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name, part in parts.items():
                for buffer, value in zip(self._buffers[name], part, strict=True):
                    if value is not None and buffer is not None:
                        buffer.copy_(value, non_blocking=True)
            self._copied = self._stream.record_event()
        return {name: self._buffers[name] for name in parts}

    def wait_for_copies(self) -> None:
        """Make the device wait until the weights are copied; call it before they change."""
        if self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
            self._copied = None

    def settle(self) -> None:
        """Wait until the latest update is in the average; call it before the average is read."""
        adding, self._adding = self._adding, None
        if adding is not None:
            adding.result()

    def end(self) -> None:
        """End the thread, free the buffers, and move the average to the host."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
        self._forget()
        self.values = {name: value.cpu() for name, value in self.values.items()}


class _Parts(NamedTuple):
    """A weight, and the correction of a split one."""

    weight: Tensor
    correction: Tensor | None


def _buffers_of(parts: Mapping[str, _Parts], device: torch.device) -> dict[str, _Parts]:
    """Return pinned memory for parts, each in the layout of its original."""
    tensors = [each for part in parts.values() for each in part if each is not None]
    sizes = [(each.numel(), each.dtype) for each in tensors]
    require_host_room(
        "copies of weights to average", sizes, "write device=module, which keeps the average on the device"
    )
    flat = iter(host_tensors(sizes, device))

    def like(tensor: Tensor) -> Tensor:
        stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        return next(flat).as_strided(tensor.shape, stride)

    return {
        name: _Parts(like(weight), None if correction is None else like(correction))
        for name, (weight, correction) in parts.items()
    }
