"""Activation offloading: keep the tensors that forward saves in host memory, or on disk, until backward needs them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_solo.cards.budget import bytes_or_share
from lightning_solo.errors import CapabilityError, NothingToDoError
from lightning_solo.machine import IN_MEMORY, file_system
from lightning_solo.nn.disk_offloading import DiskOffloader
from lightning_solo.nn.offloading import Offloader
from lightning_solo.nn.recomputation import inputs_kept_in, moves_activations
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.activation_offloading.card import ALL, BLOCK_INPUTS, CARD, DISK, Settings
from lightning_solo.units import format_bytes

IN_FLIGHT = {BLOCK_INPUTS: 1, ALL: 4, DISK: 1}
"""Copies in flight, in units of the largest tensor: those of blocks that move all of theirs come in bursts."""


class ActivationOffloading(Technique, Settings):
    """Keeps saved tensors in page-locked host memory between forward and backward during a fit.

    Raises:
        ConflictError: ``folder`` without ``mode="disk"``.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._offloader: Offloader | None = None
        self._is_reported = False

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the host in the current or last fit."""
        return 0 if self._offloader is None else self._offloader.moved_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in use; 0 outside a fit."""
        return 0 if self._offloader is None else self._offloader.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file of ``mode="disk"``; 0 outside a fit."""
        return self._offloader.disk_bytes if isinstance(self._offloader, DiskOffloader) else 0

    def transform(self, ctx: Run) -> None:
        if ctx.device.type != "cuda" and not self.allow_cpu:
            raise CapabilityError(CARD.requires[0].remedy)
        keep = None if self.keep_on_device is None else bytes_or_share(self.keep_on_device)
        options = self.min_offload_bytes, IN_FLIGHT[self.mode], keep
        if self.mode == DISK:
            self._offloader = DiskOffloader(ctx.device, self._disk_folder(), *options)
        else:
            self._offloader = Offloader(ctx.device, *options)
        self._is_reported = False
        ctx.undo.callback(self._offloader.free_buffers)

    def _disk_folder(self) -> Path:
        """Return the folder of the file."""
        remedy = "write callback.activation_offloading.folder=<a folder on a local SSD>"
        folder = Path(self.folder or tempfile.gettempdir()).expanduser()
        if not folder.is_dir():
            raise CapabilityError(f"activation offloading: folder={str(folder)!r}: no such folder; {remedy}")
        kind = file_system(folder.resolve())
        if kind in IN_MEMORY and not self.allow_cpu:
            raise CapabilityError(
                f"activation offloading: folder={str(folder)!r} is {kind}: a file there takes host memory, which"
                f" mode=disk is meant to save; {remedy}, or callback.activation_offloading.mode=block_inputs"
            )
        return folder

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._offloader is not None  # transform comes first
        self._offloader.leave(ctx.module)
        if self.mode == BLOCK_INPUTS and moves_activations(ctx.module):
            self._offloader.in_flight = IN_FLIGHT[ALL]
        saving = self._offloader.saving
        with saving() if self.mode == ALL else inputs_kept_in(saving):
            return proceed(*args, **kwargs)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._offloader is None or self._is_reported or self.ctx is None or self.ctx.window.waits:
            return
        self._is_reported = True
        moved, left = format_bytes(self.moved_bytes), self._offloader.largest_left_bytes
        saved = self._offloader.saved_bytes
        if not self.moved_bytes and saved:
            if self.ctx is not None:
                self.ctx.info(
                    f"activation offloading: all {format_bytes(saved)} stay on the device, within"
                    f" keep_on_device={self.keep_on_device}"
                )
        elif not self.moved_bytes and not left:
            raise NothingToDoError(
                f"activation offloading moved nothing: mode={self.mode} moves the inputs of recomputed blocks, and no"
                " block was recomputed: write +callback=activation_checkpointing, or"
                " callback.activation_offloading.mode=all; if torch.compile compiles the whole module, write"
                " +callback=regional_compilation instead"
                if self.mode != ALL
                else (
                    "activation offloading moved nothing: forward saved only weights; write"
                    " ~callback.activation_offloading"
                )
            )
        elif not self.moved_bytes:
            rank_zero_warn(
                f"activation offloading saves nothing: the largest saved tensor has {left} bytes, and"
                f" callback.activation_offloading.min_offload_bytes={self.min_offload_bytes}; write a smaller one, or"
                " ~callback.activation_offloading"
            )
        elif self.mode == ALL:
            rank_zero_warn(
                f"activation offloading: mode=all moves {moved} of activations to the host and back in every"
                " micro-batch, and a step waits for what the bus can't hide; with +callback=activation_checkpointing"
                " callback.activation_offloading.mode=block_inputs moves far less"
            )
        elif self.ctx is not None:
            place = "the host"
            if self.mode == DISK:
                place = f"a disk, through {format_bytes(self.host_bytes)} of host memory,"
            self.ctx.info(f"activation offloading: {moved} of block inputs are kept on {place} in each micro-batch")
