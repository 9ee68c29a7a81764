"""Make DeepSpeed's engine for a module on the host, and copy the trained weights out of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.zero.deepspeed_internals import is_partitioned, release_weight_buffers, uses_disk
from lightning_solo.zero.deepspeed_patches import align_gradients, prefetch_once


def make_engine(
    module: nn.Module, config: Mapping[str, Any], optimizer: Optimizer | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return DeepSpeed's engine for a module on the host; without an ``optimizer`` it only runs forward."""
    import deepspeed

    if config.get("zero_optimization", {}).get("stage") == 3:
        _partition(module, config, dtype, device)
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=device.index),
        model=module,
        optimizer=optimizer,
        model_parameters=[p for p in module.parameters() if p.requires_grad] if optimizer else [],
        config=dict(config),
        dist_init_required=False,
    )
    if uses_disk(engine.optimizer):
        align_gradients(engine.optimizer.optimizer_swapper)
    prefetch_once(engine)
    return engine


def _partition(module: nn.Module, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Partition the parameters one by one; deepspeed.initialize would first move all of them to the device."""
    import deepspeed

    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    place = config["zero_optimization"].get("offload_param", {}).get("device")
    deepspeed.zero.Init(module=module, config_dict_or_path=dict(config), remote_device=place)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def weights_of(engine: Any, module: nn.Module, known: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return parameter -> value: the ``known`` values, such as fp32 masters, and copies of partitioned parameters.

    A parameter that is missing from the result has its value in itself.
    """
    if engine is not None:
        release_weight_buffers(engine)
    return {**known, **{p: gathered(p) for p in module.parameters() if p not in known and is_partitioned(p)}}


def gathered(parameter: Tensor) -> Tensor:
    """Return a copy, on the host, of a parameter that stage 3 has partitioned."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()
