"""The Triton kernels of `optim.gpu_kernel` on the simulated device: each launch counts as one, and runs by operators.

Only the kernels are replaced; grouping, uploads, flags and the choice of other kernels are the real code. Run
`make kernels` to compare the kernels with the operators in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_solo.optim import gpu_kernel, triton_launches
from lightning_solo.optim.kernels import Control, Piece, Sum
from lightning_solo.optim.operator_kernels import OperatorKernels, norm
from tests.simcuda import device

CPU = torch.device("cpu")
COLUMNS = 22  # of the table that is uploaded for many pieces
SUM_COLUMNS = 6


def install() -> None:
    """Make `gpu_kernel.kernels` find Triton, and redirect its launches to this module."""
    gpu_kernel.is_installed = lambda name: True
    triton_launches.launch_steps = _step
    triton_launches.launch_sums = _add


def _step(pieces: Sequence[Piece], control: Control, where: torch.device) -> None:
    reads, name = [control.scale], "step_one"
    if len(pieces) > 1:
        name = "step_many"
        reads += triton_launches.uploaded(np.zeros((len(pieces), COLUMNS), np.int64), [1] * len(pieces), 7, where)
    given = [tensor for piece in pieces for tensor in piece.tensors.values()]
    written = [x for piece in pieces for name, x in piece.tensors.items() if name != "grad"]

    def body(scale: Tensor, *tensors: Tensor) -> None:
        there = iter(tensors[len(reads) - 1 :])
        flags = tensors[-1]
        here = [replace(piece, tensors={name: next(there) for name in piece.tensors}) for piece in pieces]
        for piece in here:
            if not bool(scale.isnan()) and not bool(piece.tensors["grad"].isfinite().all()):
                flags[piece.index] = 1
        OperatorKernels(CPU, fused=False).step(here, Control(scale, flags, control.bound))

    device.launch(name, body, reads=[*reads, *given], writes=[*written, control.not_finite])


def _add(sums: Sequence[Sum], control: Control, where: torch.device) -> None:
    reads: list[Tensor] = []
    if len(sums) > 1:
        reads += triton_launches.uploaded(np.zeros((len(sums), SUM_COLUMNS), np.int64), [1] * len(sums), 3, where)
    extra = len(reads)
    reads += [each.gradient for each in sums]
    reads += [each.total for each in sums if each.total is not None and not each.is_first]
    totals = [each.total for each in sums if each.total is not None]
    partials = [each.partials for each in sums if each.partials is not None]

    def body(*tensors: Tensor) -> None:
        gradients = tensors[extra : extra + len(sums)]
        written = tensors[len(reads) :]
        for at, (each, gradient) in enumerate(zip(sums, gradients, strict=True)):
            total = gradient
            if each.total is not None:
                total = written[at]
                total.copy_(gradient) if each.is_first else total.add_(gradient)
            place = written[len(totals) + at]
            for number, part in enumerate(total.split(triton_launches.PER_PARTIAL)):
                place[number] = norm(part, control.bound)

    device.launch("add_one" if len(sums) == 1 else "add_many", body, reads=reads, writes=[*totals, *partials])
