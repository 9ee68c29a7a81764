"""What CUDA's caching allocator reserves without using it, and segments that can grow."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_solo.errors import CapabilityError
from lightning_solo.memory.reading import Reading, read
from lightning_solo.memory.segments import (
    FreeMemory,
    are_expandable,
    expandable_segments,
    free_memory,
    segments_of,
    why_not_expandable,
)
from lightning_solo.seams import patches
from lightning_solo.techniques.allocator.card import Settings
from lightning_solo.units import GiB, format_bytes

WORTH_IT = 0.1
"""Share of the reserved bytes from which unused ones are worth advice."""


def advice(reading: Reading, free: FreeMemory, retries: int, expandable: bool) -> str:
    """Return a text on the memory that the allocator reserves without using it.

    Args:
        reading: of the device, with its peaks.
        free: memory in the allocator's segments at the same time.
        retries: requests of this fit for which cached segments were given back first.
        expandable: whether the segments can grow.
    """
    reserved, allocated = reading.peak_reserved or 0, reading.peak_allocated or 0
    unused = reserved - allocated
    text = (
        f"at the peak {format_bytes(reserved)} were reserved and {format_bytes(allocated)} allocated. Now the largest "
        f"free block has {format_bytes(free.largest)}, and empty_cache() would return {format_bytes(free.returnable)}. "
    )
    if retries:
        text += f"{retries} requests found no room before cached memory was given back, which waits for the device. "
    if not retries and unused < WORTH_IT * reserved:
        return f"{text}Nothing to gain."
    if expandable:
        return (
            f"{text}Segments are expandable already: lower the peak, for example by callback=activation_checkpointing."
        )
    return f"{text}Write callback.allocator.expandable_segments=true: it saves at most {format_bytes(unused)}."


class Allocator(Callback, Settings):
    """Logs what CUDA's caching allocator reserves and uses, and advises at the end of a fit.

    With ``expandable_segments`` new segments can grow, from ``setup`` to the end of the run: a request that fits in no
    gap extends the last one, where it would take a segment of its own.

    Attributes:
        advice: of the last fit; empty before.
    """

    def _init_state(self) -> None:
        self.advice = ""
        self._undo = ExitStack()
        self._start(None)

    def _start(self, device: torch.device | None) -> None:
        self._undo.close()
        self._device = device
        self._step = self._retries = 0  # of the last reading; before the fit

    # --- when: Lightning's hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make segments expandable, before the weights are on the device."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise CapabilityError(
                f"allocator needs a CUDA device, and this run is on {device}, whose memory has no caching allocator;"
                " leave it out, and write memory_logger for the memory of the process"
            )
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise CapabilityError(
                f"allocator: torch's allocator is {backend}, which has no segments; leave the callback out, or remove"
                f" backend:{backend} from PYTORCH_ALLOC_CONF"
            )
        self._start(device)
        if not self.expandable_segments:
            return
        if reason := why_not_expandable():
            raise CapabilityError(f"callback.allocator.expandable_segments=true: {reason}")
        self._undo.enter_context(expandable_segments())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count retries."""
        if self._device is not None:
            self.advice, self._step = "", trainer.global_step
            self._retries = read(self._device).alloc_retries or 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log if this optimizer step is due."""
        step = trainer.global_step
        # not a multiple: under manual optimization a batch may have several optimizer steps
        if self._device is not None and step - self._step >= self.every_n_steps:
            self._log(trainer, self._device)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last steps and the advice, while the model is on its device."""
        if self._device is None:
            return
        logged = trainer.global_step == self._step
        reading, free = self._read(self._device) if logged else self._log(trainer, self._device)
        retries = (reading.alloc_retries or 0) - self._retries
        self.advice = advice(reading, free, retries, are_expandable())
        rank_zero_info(f"allocator: {self.advice}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make new segments ordinary again."""
        self._start(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Make new segments ordinary again, since Lightning calls no teardown after an exception."""
        self._start(None)

    # --- what ---

    def _log(self, trainer: Trainer, device: torch.device) -> tuple[Reading, FreeMemory]:
        self._step = trainer.global_step
        reading, free = self._read(device)
        figures = {
            "allocated": reading.allocated,
            "reserved": reading.reserved,
            "largest_free_block": free.largest,
            "returnable": free.returnable,
        }
        logged = {f"memory/{name}_gib": (count or 0) / GiB for name, count in figures.items()}
        patches.log_metrics(trainer, {**logged, "memory/alloc_retries": float(reading.alloc_retries or 0)})
        return reading, free

    @staticmethod
    def _read(device: torch.device) -> tuple[Reading, FreeMemory]:
        return read(device), free_memory(segments_of(device))
