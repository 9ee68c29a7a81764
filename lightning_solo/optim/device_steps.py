"""Kernels, controls and multi-parameter launches that the steps of a `CompactAdamW` share on a device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lightning_solo.optim import kernels
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.kernels import Control, Piece
from lightning_solo.optim.staging import Staging

LAUNCH_NUMEL = 2**26
"""Elements of the parameters that one launch steps."""


class DeviceSteps:
    """Kernels of an optimizer's steps on one device, and their controls, which share a tensor of flags."""

    def __init__(self, device: torch.device, count: int, numel: int, fused: bool | None) -> None:
        self.device = device
        self.kernels = kernels.kernels_on(device, fused=fused, numel=numel)
        self._count = count
        self._controls: dict[float, Control] = {}  # by bound, of steps whose gradients are not scaled

    @cached_property
    def _one(self) -> Tensor:
        return torch.ones((), dtype=torch.float32, device=self.device)

    @cached_property
    def _flags(self) -> Tensor:
        return torch.zeros(self._count, dtype=torch.int32, device=self.device)

    def control(self, scale: Tensor | None = None, bound: float = math.inf) -> Control:
        """Return a control that clamps gradients to a bound, then multiplies them by a scale (fp32; None: 1)."""
        if scale is not None:
            return Control(scale, self._flags, bound)
        if bound not in self._controls:
            self._controls[bound] = Control(self._one, self._flags, bound)
        return self._controls[bound]

    def step_staged(
        self, whole: Piece, on_host: Collection[str], control: Control, staging: Staging, packed: Tensor | None = None
    ) -> None:
        """Step a parameter piece by piece; its tensors named in ``on_host`` pass through the device.

        Args:
            whole: the parameter.
            on_host: names of its states on the host, then of its gradient if that is there.
            control: of the step.
            staging: through which they pass.
            packed: bytes of its states on the host, if they are in one piece of memory.
        """
        parts = whole.split(self.kernels.piece // BLOCK)
        for part in parts:
            pieces = {name: part.tensors[name] for name in on_host}
            at_once = packed if len(parts) == 1 else None
            with staging.on_device(pieces, unchanged=("grad",), packed=at_once) as staged:
                tensors = {**part.tensors, **staged}
                self.kernels.step([Piece(tensors, part.scalars, part.first_row, part.index)], control)

    def pop_not_finite(self) -> int | None:
        """Return the number of a parameter that was stepped with a non-finite gradient, and clear the record.

        Waits for the device. None: there is no such parameter, or ``kernels.folds`` is False.
        """
        if "_flags" not in vars(self) or not bool(self._flags.any()):
            return None
        first = int(self._flags.nonzero()[0])
        self.forget_not_finite()
        return first

    def forget_not_finite(self) -> None:
        """Clear the record of non-finite gradients."""
        if "_flags" in vars(self):
            self._flags.zero_()


def launches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the lists of pieces that one launch steps."""
    launch: list[Piece] = []
    numel = 0
    for piece in pieces:
        if launch and numel + piece.numel > LAUNCH_NUMEL:
            yield launch
            launch, numel = [], 0
        launch.append(piece)
        numel += piece.numel
    yield launch
