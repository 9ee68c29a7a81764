"""Torch's global state that a forward depends on, so that it can be repeated."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_solo.random_states import torch_sources

_CPU = torch.device("cpu")


class ForwardState:
    """Torch's random numbers, autocast, default dtype and default device now; a context that sets them again.

    Args:
        devices: that the forward computes on, besides the CPU.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        others = {*devices} - {_CPU}
        self._generators = [*torch_sources(others).values()]
        self._kinds = ["cpu", *{device.type for device in others if device.type != "meta"}] if others else ["cpu"]
        self._numbers = [generator.get() for generator in self._generators]
        self._autocast = _autocast(self._kinds)
        self._dtype, self._device = torch.get_default_dtype(), _default_device()

    def __enter__(self) -> None:
        self._numbers_outside = [generator.get() for generator in self._generators]
        self._dtype_outside = torch.get_default_dtype()
        self._contexts: list[AbstractContextManager[Any]] = []
        now = _autocast(self._kinds)
        if now != self._autocast:
            self._contexts += [torch.autocast(*before) for before in self._autocast if before not in now]
        if self._device is not None:
            self._contexts.append(self._device)
        for context in self._contexts:
            context.__enter__()
        self._set(self._numbers, self._dtype)

    def __exit__(self, *error: Any) -> None:
        self._set(self._numbers_outside, self._dtype_outside)
        for context in reversed(self._contexts):
            context.__exit__(*error)

    def _set(self, numbers: list[torch.Tensor], dtype: torch.dtype) -> None:
        for generator, state in zip(self._generators, numbers, strict=True):
            generator.put(state)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


def _autocast(kinds: Iterable[str]) -> list[tuple[str, torch.dtype, bool, bool]]:
    """Return arguments of ``torch.autocast`` that give the state of now."""
    cache = torch.is_autocast_cache_enabled()
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache) for kind in kinds]


def _default_device() -> torch.device | None:
    """Return the device that ``with device:`` has set; None outside such contexts."""
    # torch's function takes 3 microseconds
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None
