"""What ZenFlow wants beside its section of the configuration: a version of CPUAdam, and its options once more.

It isn't AdamW: what it finds unimportant is applied late, and where it selects anew it rounds the fp32 masters to the
device's bf16 weights and forgets the moments of what was selected.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError
from lightning_solo.optim.replacement import note_steps
from lightning_solo.zero.refusals import is_deepspeeds_adamw
from lightning_solo.zero.states import as_shaped

SHARED = ("lr", "betas", "eps", "weight_decay")


def with_optimizer(config: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the configuration with options for ZenFlow's second optimizer, the one on the device.

    Raises:
        ConflictError: the optimizer is not AdamW.
    """
    if not is_deepspeeds_adamw(optimizer):
        raise ConflictError(
            f"strategy.config.zero_optimization.zenflow and {type(optimizer).__name__}: ZenFlow is a way to compute"
            " AdamW; write torch.optim.AdamW and strategy.host_optimizer=auto, or solo=zero_offload"
        )
    first = optimizer.param_groups[0]
    return {**config, "optimizer": {"type": "AdamW", "params": {name: first[name] for name in SHARED}}}


def share_options(zero: Any) -> None:
    """Give each group of the optimizer on the device the options of the user's; DeepSpeed has one set for all."""
    for ours, theirs in zip(zero.selective_optimizer.param_groups, zero.optimizer.param_groups, strict=True):
        ours.update({name: theirs[name] for name in SHARED})


def mend_weights(zero: Any) -> None:
    """Read weights from the flat tensor as they were put there; DeepSpeed (0.19.8) puts matrices there transposed.

    It then takes a matrix's elements in the other order, so that a module trains from scrambled weights.
    """

    def update(group_index: int) -> None:
        flat = zero.bit16_groups_flat[group_index]
        places = (zero.round_robin_bit16_groups, zero.round_robin_bit16_meta, zero.round_robin_bit16_offsets)
        for parameter, meta, offset in zip(*(place[group_index] for place in places), strict=True):
            parameter.data = as_shaped(flat.narrow(0, offset, meta.numel()), meta.shape, transposed=True)

    zero._update_model_bit16_weights = update
    for index in range(len(zero.bit16_groups_flat)):
        update(index)


def require_matrices(module: nn.Module) -> None:
    """Refuse parameters of shapes in which ZenFlow (DeepSpeed 0.19.8) finds no columns.

    Raises:
        ConflictError: names them.
    """
    odd = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad and not _has_columns(p.shape)}
    if odd:
        named = ", ".join(f"{name} {shape}" for name, shape in list(odd.items())[:5])
        raise ConflictError(
            f"strategy.config.zero_optimization.zenflow and {len(odd)} parameters that are neither vectors nor matrices"
            f" of several rows ({named}): ZenFlow selects columns of matrices; write solo=zero_offload"
        )


def _has_columns(shape: Sequence[int]) -> bool:
    return len(shape) == 1 or (len(shape) == 2 and shape[0] > 1)


def into_zenflow(optimizer: Any, *, overlap_step: bool) -> None:
    """Make a DeepSpeedCPUAdam the version that ZenFlow steps, which differs in how it counts."""
    tells_schedulers = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    optimizer.__class__ = importlib.import_module("deepspeed.ops.adam").ZenFlowCPUAdam
    optimizer.overlap_step = overlap_step
    if tells_schedulers:
        note_steps(optimizer, None if overlap_step else type(optimizer)._sequential_step)
        optimizer._opt_called = True  # in every step the one on the device steps, this one now and then
    elif not overlap_step:
        optimizer.step = optimizer._sequential_step
