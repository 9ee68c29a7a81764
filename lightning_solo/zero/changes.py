"""Keep changes that user code makes to weights in place during a run, such as clamping or a teacher's average.

DeepSpeed (0.19.8) steps fp32 masters and copies them over the weights, which undoes a change at the next step. Here
torch's count of changes in place detects the change, and its value is copied into the master.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import listed
from lightning_solo.zero.deepspeed_internals import is_partitioned
from lightning_solo.zero.engine import gathered
from lightning_solo.zero.states import ParameterStates, read, write


class OutsideChanges:
    """Finds weights that were changed in place under ``torch.no_grad()``. Changes of ``p.data`` are not found.

    Args:
        module: of an existing engine.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._versions = {p: p._version for p in self._names}
        self._checked: set[Tensor] = set()

    def take_over(self, zero: Any, kept: dict[Tensor, Tensor]) -> None:
        """Copy changed weights into their fp32 masters.

        Args:
            zero: ZeRO's optimizer.
            kept: frozen parameter -> its fp32 value; replaced where the parameter was changed.
        """
        changed = {p: p._version for p, version in self._versions.items() if p._version != version}
        if not changed:
            return
        partitioned = {p: gathered(p) for p in changed if is_partitioned(p)}
        self._warn_if_lost(zero, kept, partitioned)
        values = {p: partitioned.get(p, p.detach()).cpu().float() for p in changed}
        write(zero, {p: ParameterStates(value) for p, value in values.items() if p.requires_grad})
        kept.update({p: value for p, value in values.items() if p in kept})
        self._versions |= changed

    def _warn_if_lost(self, zero: Any, kept: dict[Tensor, Tensor], partitioned: dict[Tensor, Tensor]) -> None:
        """Warn about weights whose change had no effect because stage 3 had emptied them."""
        first = {p: value for p, value in partitioned.items() if p not in self._checked}
        self._checked |= set(first)
        if not first:
            return
        before = {**kept, **{p: states.master for p, states in read(zero, masters_only=True).items()}}
        lost = [p for p, value in first.items() if p in before and torch.equal(value, before[p].to(value.dtype))]
        if lost:
            warnings.warn(
                f"{listed(self._names[p] for p in lost)}: changed in place, and as before. At ZeRO's stage 3 parameters"
                " are empty outside of the forward pass, and the change is lost; write with"
                " deepspeed.zero.GatheredParameters(parameters, modifier_rank=0): around it, or strategy.stage=2",
                stacklevel=2,
            )
