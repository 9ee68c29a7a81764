"""What ZenFlow needs beside its section of the configuration, and what it can't train.

It isn't AdamW: what it finds unimportant is applied late, and where it selects anew it rounds the fp32 masters to the
device's bf16 weights and forgets the moments of what was selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError
from lightning_solo.zero.refusals import is_deepspeeds_adamw

SHARED = ("lr", "betas", "eps", "weight_decay")


def with_optimizer(config: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the configuration with the options of ZenFlow's second optimizer, the one on the device.

    Raises:
        ConflictError: the optimizer is not AdamW.
    """
    if not is_deepspeeds_adamw(optimizer):
        raise ConflictError(
            f"strategy.config.zero_optimization.zenflow and {type(optimizer).__name__}: ZenFlow is a way to compute"
            " AdamW; write torch.optim.AdamW and strategy.host_optimizer=auto, or take the preset zero_offload"
        )
    first = optimizer.param_groups[0]
    return {**config, "optimizer": {"type": "AdamW", "params": {name: first[name] for name in SHARED}}}


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
            f" of several rows ({named}): ZenFlow selects columns of matrices; take the preset zero_offload"
        )


def _has_columns(shape: Sequence[int]) -> bool:
    return len(shape) == 1 or (len(shape) == 2 and shape[0] > 1)
