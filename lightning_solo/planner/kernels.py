"""The kernels of compact states in a plan: they compute nothing, and record the bytes that Triton's move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from lightning_solo.attributes import replaced
from lightning_solo.optim import adamw_update, kernels
from lightning_solo.optim.gpu_kernel import TritonKernels
from lightning_solo.optim.kernels import Control, Kernels, Piece, Sum
from lightning_solo.optim.operator_kernels import OperatorKernels


class PlannedKernels(TritonKernels):
    """Records the bytes of each launch.

    Args:
        launched: is called with the bytes that each launch reads and writes.
        fused: whether a Triton kernel steps, rather than compiled operators.
    """

    def __init__(self, launched: Callable[[int], None], *, fused: bool = True) -> None:
        self._launched, self._fused = launched, fused

    def step(self, pieces: Sequence[Piece], control: Control) -> None:
        """Read all tensors of the pieces once, and write all but the gradients."""
        moved = 0
        for piece in pieces:
            moved += sum(tensor.nbytes * (1 if name == "grad" else 2) for name, tensor in piece.tensors.items())
            if not self._fused or not self.serves(piece.layout):  # compiled: two fp32 buffers of a chunk
                size = min(piece.numel, adamw_update.CHUNK["cuda"])
                buffers = [torch.empty(size, device=piece.tensors["weight"].device) for _ in range(2)]
                moved += 2 * 4 * piece.numel * len(buffers)
                del buffers
        self._launched(moved)

    def add(self, sums: Sequence[Sum], control: Control) -> None:
        """Read gradients and totals once, and write the totals."""
        totals = [each.total.nbytes * (1 if each.is_first else 2) for each in sums if each.total is not None]
        self._launched(sum(each.gradient.nbytes for each in sums) + sum(totals))


def planned_kernels(launched: Callable[[int], None], *, cuda: bool) -> AbstractContextManager[None]:
    """Make optimizers and sums of gradients use a plan's kernels: Triton's on a GPU, torch's operators on a CPU."""

    def kernels_on(device: torch.device, *, fused: bool | None = None, numel: int = 0) -> Kernels:
        if cuda:
            return PlannedKernels(launched, fused=fused is not False)
        return OperatorKernels(device, fused=False)

    return replaced(kernels, "kernels_on", kernels_on)
