"""Copies of checkpoints in host memory, which a thread can write while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def snapshot(value: Any) -> Any:
    """Return a copy of a checkpoint with all tensors in host memory; tensors that share memory share it in the copy."""
    return _copied(value, {})


def _copied(value: Any, storages: dict[Any, torch.UntypedStorage]) -> Any:
    if isinstance(value, Tensor):
        return _copy_of(value.detach(), storages)
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        changed: Any = copy.copy(value)  # keeps the attributes of a state dict
        for key, each in value.items():
            changed[key] = _copied(each, storages)
        return changed
    if type(value) in (list, tuple):
        return type(value)(_copied(each, storages) for each in value)
    return copy.deepcopy(value)


def _copy_of(tensor: Tensor, storages: dict[Any, torch.UntypedStorage]) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return tensor.clone().cpu()
    storage = tensor.untyped_storage()
    key = storage.device, storage.data_ptr(), storage.nbytes()
    if key not in storages:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
        storages[key] = whole.to("cpu", copy=True).untyped_storage()
    same = torch.empty(0, dtype=tensor.dtype)
    return same.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload,no-any-return]
