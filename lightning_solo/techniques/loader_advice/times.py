"""The seconds of a fit that are spent waiting for batches, copying them to the device, and in steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from lightning_solo.data.nested import tensors_of


class HostClock:
    """The host's clock, for training on a CPU; it has the methods of `DeviceClock`."""

    def mark(self) -> float:
        return perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def between(self, first: float, last: float) -> float:
        return last - first


class DeviceClock:
    """A CUDA device's clock: a mark is the time at which the device finishes all work launched so far.

    While the host waits for a batch, the device may still be working. So the seconds between a mark before the wait and
    one after it are those in which the device was idle.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Return the moment at which the device will have done the work launched so far."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def has_passed(self, mark: Any) -> bool:
        """Return whether the device has reached a moment."""
        return bool(mark.query())

    def between(self, first: Any, last: Any) -> float:
        """Wait until the device has reached two moments, and return the seconds between them."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000


@dataclass(frozen=True)
class Times:
    """Seconds of a fit, without its first batch and its validations."""

    batches: int  # number of trained batches
    total_s: float  # seconds of all these batches
    wait_s: float  # seconds in which the device was idle and waited for a batch
    copy_s: float  # seconds of the batches' copies to the device
    start_s: float = 0.0  # seconds in which workers were started, if they start with each epoch
    first_s: float = 0.0  # seconds of waiting for the first batch of an epoch, if workers start with it
    validation_s: float = 0.0  # seconds of validations; not part of the total
    load_s: float = 0.0  # seconds of the host in the loader, if it loads in the training thread; else 0
    collate_s: float = 0.0  # the part of ``load_s`` that is spent in ``collate_fn``
    is_pageable: bool = False  # whether batches are copied to a GPU from host memory that isn't pinned

    @property
    def step_s(self) -> float:
        """All remaining seconds: forward, backward, the optimizer, callbacks."""
        return self.total_s - self.wait_s - self.copy_s - self.start_s - self.first_s

    @property
    def items_s(self) -> float:
        """Seconds of the host in the loader without ``collate_fn``: the data set's items."""
        return self.load_s - self.collate_s


class Watch:
    """Sums up the seconds of a fit from its second batch on, since the first one includes the set-up.

    Args:
        device: of the training.
        starts_workers: whether workers start with each epoch.
        loads_here: whether the loader loads in this thread, between steps.
    """

    def __init__(self, device: torch.device, *, starts_workers: bool, loads_here: bool) -> None:
        self._clock = DeviceClock(device) if device.type == "cuda" else HostClock()
        self._starts_workers = starts_workers
        self._loads_here = loads_here
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._pending: deque[tuple[str, Any, Any]] = deque()  # moments that the device has not reached
        self._origin: Any = None
        self._fetched = self._batches = 0
        self._epoch: Any = None  # the moment it began, until its first batch is waited for
        self._wait: tuple[Any, float, str] | None = None  # (moment, host's time, figure to add to)
        self._validation: Any = None
        self._is_pageable: bool | None = None if device.type == "cuda" else False

    def begin_wait(self, *, with_epoch: bool = False) -> None:
        """Start timing the wait for a batch, or ``with_epoch`` for the loader's iterator."""
        moment = self._clock.mark()
        if with_epoch:
            self._epoch = moment
            return
        epoch, self._epoch = self._epoch, None
        began = moment if epoch is None else epoch
        if self._fetched == 1:
            self._origin = began
        if epoch is not None and self._starts_workers:
            self._add("start", epoch)
            self._wait = moment, perf_counter(), "first"
        else:
            self._wait = began, perf_counter(), "wait"

    def end_wait(self) -> None:
        """Stop timing the wait: the batch has arrived, or the loader has ended."""
        assert self._wait is not None
        (moment, begun, name), self._wait = self._wait, None
        self._fetched += 1
        self._add(name, moment)
        if self._loads_here:
            self._count("load", perf_counter() - begun)

    def collating(self, collate: Callable[[Any], Any], samples: Any) -> Any:
        """Return ``collate(samples)``, timed if training waits for the batch."""
        begun = perf_counter()
        batch = collate(samples)
        if self._wait is not None:
            self._count("collate", perf_counter() - begun)
        return batch

    def copying(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that times ``copy``, except during validations."""

        def copied(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._validation is not None:
                return copy(batch, *args, **kwargs)
            if self._is_pageable is None:
                hosted = [tensor for tensor in tensors_of(batch) if tensor.device.type == "cpu"]
                self._is_pageable = not all(tensor.is_pinned() for tensor in hosted)
            moment = self._clock.mark()
            batch = copy(batch, *args, **kwargs)
            self._add("copy", moment)
            return batch

        return copied

    def end_batch(self) -> None:
        """Count a trained batch."""
        self._batches += self._origin is not None

    def begin_validation(self) -> None:
        self._validation = self._clock.mark()

    def end_validation(self) -> None:
        moment, self._validation = self._validation, None
        self._add("validation", moment)

    def finish(self) -> Times:
        """Return the seconds up to now, after waiting for the device; an interrupted step counts too."""
        if self._epoch is not None:
            self.begin_wait()
        if self._wait is not None:
            self.end_wait()
        if self._validation is not None:
            self.end_validation()
        self._add("all", self._origin)
        self._settle(wait=True)
        seconds = {f"{name}_s": self._seconds[name] for name in ("wait", "copy", "start", "first", "validation")}
        return Times(
            self._batches,
            self._seconds["all"] - self._seconds["validation"],
            **seconds,
            load_s=self._seconds["load"],
            collate_s=self._seconds["collate"],
            is_pageable=bool(self._is_pageable),
        )

    def _add(self, name: str, since: Any) -> None:
        if self._origin is not None:
            self._pending.append((name, since, self._clock.mark()))
            self._settle()

    def _count(self, name: str, seconds: float) -> None:
        if self._origin is not None:
            self._seconds[name] += seconds

    def _settle(self, *, wait: bool = False) -> None:
        while self._pending and (wait or self._clock.has_passed(self._pending[0][2])):
            name, first, last = self._pending.popleft()
            self._seconds[name] += self._clock.between(first, last)
