"""Fused kernels: Liger's kernels run a model's normalisations and gated feed-forward parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_solo.errors import CapabilityError, NothingToDoError
from lightning_solo.machine import is_installed
from lightning_solo.nn import liger
from lightning_solo.nn.blocks import counted
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.fused_kernels import Computation, Fused, fusable_layers, fuse_layers
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.fused_kernels.card import AUTO, CARD, KERNELS, Settings


class FusedKernels(Technique, Settings):
    """Runs normalisations and gated feed-forward parts by Liger's kernels during a fit, its validation included.

    Layers of any package are recognised by their computation (`lightning_solo.nn.fused_kernels`). Types, weights and
    checkpoints are unchanged.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._computations: dict[str, Computation] = {}

    @property
    def layers(self) -> dict[str, str]:
        """Qualified name -> kernel of each replaced layer; empty outside a fit."""
        return {name: computation.kernel for name, computation in self._computations.items()}

    def transform(self, ctx: Run) -> None:
        """Replace the layers' forward."""
        back_end = self._back_end(ctx.device)
        names = KERNELS if self.kernels == AUTO else [self.kernels] if isinstance(self.kernels, str) else self.kernels
        computations, left_out = fusable_layers(ctx.module, names, back_end, ctx.device)
        check_found(computations, left_out, [] if self.kernels == AUTO else names)
        layers = {name: ctx.module.get_submodule(name) for name in computations}
        ctx.undo.callback(self._computations.clear)
        ctx.undo.callback(restore_forwards, layers.values(), Fused)
        self._computations.update(computations)
        fuse_layers(layers, computations, back_end)
        kinds = dict.fromkeys(computation.kernel for computation in computations.values())
        parts = [
            f"{counted(layers[name] for name in layers if computations[name].kernel == kind)} by {kind}"
            for kind in kinds
        ]
        rank_zero_info(f"fused kernels: {'; '.join(parts)}{f'; left out: {_listed(left_out)}' if left_out else ''}")

    def _back_end(self, device: torch.device) -> str:
        if self.allow_cpu and not liger.runs_on(device):
            return "operators"
        package, cuda = CARD.requires
        if not is_installed("liger_kernel"):
            raise CapabilityError(
                f'liger-kernel is not installed: {package.words(self)}; write: pip install "{package.name}"'
            )
        if not liger.runs_on(device):
            raise CapabilityError(f"the run is on {device}: {cuda.words(self)}")
        if reason := liger.missing(device):
            raise CapabilityError(f"callback.fused_kernels: {reason}")
        return "liger"


def check_found(computations: Mapping[str, Computation], left_out: Mapping[str, str], wanted: Sequence[str]) -> None:
    """Check that each requested kernel can be used by at least one layer."""
    found = {computation.kernel for computation in computations.values()}
    missing = [name for name in wanted if name not in found]
    if missing or not computations:
        near = f"these look similar: {_listed(left_out)}" if left_out else "none looks similar"
        raise NothingToDoError(
            f"fused_kernels: no layer computes {' or '.join(missing or KERNELS)}; {near}; write"
            " callback.fused_kernels.kernels=auto, or ~callback.fused_kernels"
        )


def _listed(reasons: Mapping[str, Any]) -> str:
    """Return layers' names and reasons, grouped by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(same)} ({reason})" for reason, same in names.items())
