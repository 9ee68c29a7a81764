"""Numbers that go to the host while the device goes on, and are read there later without a wait."""

from __future__ import annotations

import torch
from torch import Tensor


class LateValues:
    """A copy of a tensor's elements that is read later.

    >>> LateValues(torch.tensor([1.0, 2.0])).read()
    [1.0, 2.0]
    """

    def __init__(self, values: Tensor) -> None:
        self._host, self._copied = values, None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """Return the elements; waits for the device only if it hasn't come to the copy yet."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()
        values: list[float] = self._host.tolist()
        return values
