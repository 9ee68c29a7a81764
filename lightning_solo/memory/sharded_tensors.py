"""Tensors of which each process has a shard, as FSDP2 makes them: along the first dimension, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return the shard that this process has of a tensor; a tensor that isn't sharded as it is."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def is_sharded(tensor: Any) -> bool:
    """Return whether this process has a shard of a tensor."""
    return hasattr(tensor, "_local_tensor")


def span(tensor: Any) -> tuple[int, int]:
    """Return the number of a shard's first element in the whole tensor, in memory order, and of its elements."""
    count = local(tensor).numel()
    if not is_sharded(tensor) or not count:
        return 0, count
    rank: int = tensor.device_mesh.get_local_rank()
    return rank * shard_numel(tensor), count


def shard_numel(tensor: Any) -> int:
    """Return the elements of each shard but the last ones, which may have fewer."""
    rows: int = tensor.shape[0]
    processes: int = tensor.device_mesh.size()
    each: int = tensor.numel() // max(1, rows)
    return -(-rows // processes) * each


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a whole contiguous tensor that a shard has, in its shape; without shards all."""
    if not is_sharded(like) or is_sharded(whole):
        return local(whole)
    first, count = span(like)
    return whole.reshape(-1)[first : first + count].view(local(like).shape)


def sharded_like(value: Any, parameter: Tensor) -> Any:
    """Return a whole tensor as the shards of a parameter of its shape; anything else as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor):
        return value
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def shards_like(shard: Tensor, parameter: Any) -> Tensor:
    """Return this process's shard as a sharded tensor like a parameter; without shards the tensor as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def gathered(states: Any, keep: bool) -> Any:
    """Return a nested state dict with whole tensors on the CPU in place of shards; all processes must call it.

    ``keep``: whether this process keeps them; else tensors that were sharded are left out of mappings.
    """
    if is_sharded(states):
        whole = states.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(states, Tensor):
        return states.detach().cpu()
    if isinstance(states, Mapping):
        return {key: gathered(value, keep) for key, value in states.items()}
    if isinstance(states, list | tuple):
        return type(states)(gathered(value, keep) for value in states)
    return states


def gathered_flat(part: Tensor, like: Any, keep: bool) -> Tensor | None:
    """Return the parts of all processes, one after the other, on the CPU; all processes must call it.

    Args:
        part: one-dimensional, of this process.
        like: the sharded tensor to which the parts belong.
        keep: whether this process keeps the whole; else None is returned.
    """
    group, device = like.device_mesh.get_group(), like.device
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(like.device_mesh.size())]
    torch.distributed.all_gather(sizes, torch.tensor([part.numel()], device=device), group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=part.dtype, device=device)
    padded[: part.numel()] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather([each.view(torch.uint8) for each in parts], padded.view(torch.uint8), group)
    return torch.cat([each[: int(size)] for each, size in zip(parts, sizes, strict=True)]).cpu() if keep else None
