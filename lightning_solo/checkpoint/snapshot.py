"""Copies of checkpoints in host memory, which a thread can write while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Snapshots:
    """Copies of checkpoints, each in the memory of the one before, since fresh memory takes longer than the copy."""

    def __init__(self) -> None:
        self._spare: dict[int, list[torch.UntypedStorage]] = {}  # bytes -> memory of the last copy
        self._used: list[torch.UntypedStorage] = []

    def copy(self, checkpoint: Any) -> Any:
        """Return a copy with all tensors in host memory; it is valid until the next one.

        Tensors that share memory share it in the copy.
        """
        self._spare.clear()
        for storage in self._used:
            self._spare.setdefault(storage.nbytes(), []).append(storage)
        self._used = []
        return self._copied(checkpoint, {})

    def _copied(self, value: Any, storages: dict[Any, torch.UntypedStorage]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_of(value.detach(), storages)
        if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
            changed: Any = copy.copy(value)  # keeps the attributes of a state dict
            for key, each in value.items():
                changed[key] = self._copied(each, storages)
            return changed
        if type(value) in (list, tuple):
            return type(value)(self._copied(each, storages) for each in value)
        return copy.deepcopy(value)

    def _copy_of(self, tensor: Tensor, storages: dict[Any, torch.UntypedStorage]) -> Tensor:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor.cpu() if tensor.device.type not in ("cpu", "meta") else tensor.clone()
        storage = tensor.untyped_storage()
        key = storage.device, storage.data_ptr(), storage.nbytes()
        if key not in storages:
            spare = self._spare.get(storage.nbytes())
            storages[key] = spare.pop() if spare else _new(storage.nbytes())
            storages[key].copy_(storage)
            self._used.append(storages[key])
        same = torch.empty(0, dtype=tensor.dtype)
        return same.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())


def _new(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8).untyped_storage()
