"""A memory limit on a CPU, which raises a device's out-of-memory error at the same operator each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_solo.memory.ledger import Ledger
from lightning_solo.units import format_bytes, parse_budget

EVENTS_AT_MOST = 10_000


class MemoryLimit(Ledger):  # type: ignore[no-untyped-call]
    """Raises torch's out-of-memory error when more bytes than a limit are live, as a small GPU does.

    `Ledger` counts the bytes of each storage, without an allocator. So the same run fails at the same operator on
    every machine, and the rest of the process doesn't count.

    Args:
        limit: bytes, or a text such as ``"2GiB"``.
        module: its weights, buffers and gradients count from the start.
        optimizers: their states count too.

    Raises:
        ValueError: the limit is no number of bytes.

    >>> with MemoryLimit("1KiB"):
    ...     torch.zeros(200).exp()
    Traceback (most recent call last):
    torch.OutOfMemoryError: out of memory: aten.exp.default would make it 1.56 KiB, the limit is 1.00 KiB
    """

    def __init__(self, limit: int | str, module: nn.Module | None = None, optimizers: Iterable[object] = ()) -> None:
        super().__init__(module, optimizers)
        self.limit = parse_budget(limit, least=0)
        self.raised = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(self.log.events) > EVENTS_AT_MOST:  # only their sum is needed
            self.reset_peak()
        before = self._now
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._now > self.limit and self._now > before:  # an operator that takes no memory is allowed
            now = self._now
            del result
            self.raised += 1
            raise torch.OutOfMemoryError(
                f"out of memory: {func} would make it {format_bytes(now)}, the limit is {format_bytes(self.limit)}"
            )
        return result
