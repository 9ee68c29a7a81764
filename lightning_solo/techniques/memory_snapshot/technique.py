"""The CUDA allocator's history at the step with the highest peak and at an OOM, as a file and as a short text."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_solo.errors import CapabilityError
from lightning_solo.memory.log_files import path_below_logs
from lightning_solo.memory.snapshot import (
    Counters,
    History,
    describe,
    holdings,
    moment_of_oom,
    moment_of_peak,
    read_counters,
    write_snapshot,
)
from lightning_solo.techniques.memory_snapshot.card import Settings

NOTABLE = 1.01
"""Factor above the last written peak from which a peak is written again, so that slightly longer batches are not."""


class MemorySnapshot(Callback, Settings):
    """Records the CUDA allocator's history during a fit, and keeps that of the batch with the highest peak.

    ``step-<global_step>-peak.pickle`` is for https://docs.pytorch.org/memory_viz; the ``.txt`` next to it names the
    parts of the peak and the lines that allocated them. A higher peak replaces both. An OOM, even if it was handled,
    gets its own files, ``step-<global_step>-oom``. The history covers one batch.

    A peak counts only if it is the highest in the process so far: after a larger one (of a validation, or of an earlier
    fit) there is no new one until ``torch.cuda.reset_peak_memory_stats`` is called.

    Raises:
        PresetError: an argument is out of range, or ``folder`` does not stay inside the directory.
    """

    def _init_state(self) -> None:
        self._history = History(self.max_entries, self.native_frames)
        self._reset()

    @property
    def words(self) -> str:
        """The text about the highest peak of the last fit, or the OOM that ended it; empty before the first."""
        return self._words

    def _reset(self) -> None:
        self._device: torch.device | None = None
        self._root: Path | None = None
        self._before = Counters(0, 0)  # when the batch began
        self._peak = 0  # the last written one
        self._path: Path | None = None  # of its file
        self._words = ""

    # --- when: Lightning's hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the recording, before the weights are on the device."""
        if stage != "fit":
            return
        self._history.stop()
        self._reset()
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise CapabilityError(
                f"memory_snapshot needs a CUDA device, and this run is on {device}: it reads the CUDA allocator's "
                "history; elsewhere memory_logger.category_steps=2 logs the categories of a step's peak, and the "
                "operator and module that make it"
            )
        self._device = device
        instead = "the text about the peak is in the log"
        self._root = path_below_logs(trainer, self.folder, "memory_snapshot.folder", instead)
        self._history.start()
        if not self._history.on:
            rank_zero_info(
                "MemorySnapshot: the allocator's history is being recorded already; that recording is read, not stopped"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start a new history for this batch."""
        if self._device is not None:
            self._history.clear()
            self._before = read_counters(self._device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the history if this batch had a handled OOM or the highest peak so far."""
        if self._device is None:
            return
        now = read_counters(self._device)
        if now.ooms > self._before.ooms:
            self._keep(trainer, pl_module, "oom")
        elif now.peak_allocated > max(self._peak * NOTABLE, self._before.peak_allocated):
            self._peak = now.peak_allocated
            self._keep(trainer, pl_module, "peak")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop recording, and print the text about the peak."""
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the history of an OOM and stop recording, since Lightning calls no teardown."""
        try:
            device = self._device
            # the allocator counts OOMs, also those that cuBLAS and cuDNN raise with other messages
            if device is not None and (is_oom_error(exception) or read_counters(device).ooms > self._before.ooms):
                self._keep(trainer, pl_module, "oom")
        except Exception as error:
            warnings.warn(f"MemorySnapshot: no snapshot of the failure: {error}", stacklevel=2)
        finally:
            self._finish()

    # --- what ---

    def _keep(self, trainer: Trainer, pl_module: LightningModule, what: str) -> None:
        """Take a snapshot, and write it with its description; a peak's files replace those of the previous peak."""
        snapshot = torch.cuda.memory._snapshot()
        index = (self._device.index if self._device is not None else 0) or 0
        moment = moment_of_oom(snapshot, index) if what == "oom" else None
        moment = moment or moment_of_peak(snapshot, index)
        step = trainer.global_step
        title = "out of memory" if what == "oom" else "memory at the peak"
        words = describe(f"{title}, optimizer step {step}", moment, holdings(moment, pl_module, trainer.optimizers))
        self._words = words
        if self._root is None:
            return
        path = self._root / f"step-{step}-{what}.pickle"
        try:
            write_snapshot(snapshot, words, path)
            if what == "peak":
                before, self._path = self._path, path
                if before is not None and before != path:
                    before.unlink(missing_ok=True)
                    before.with_suffix(".txt").unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"MemorySnapshot: {path} cannot be written ({error})", stacklevel=2)
        self._words = f"{words}\n{path}"

    def _finish(self) -> None:
        if self._device is not None and self._words:
            rank_zero_info(self._words)
        self._device = None
        self._history.stop()
