"""The memory of a run, step by step: to every logger, to a CSV, and as a table at the end."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from lightning_solo.cards.arguments import Parameter, check_arguments
from lightning_solo.memory.category_peaks import CategoryPeaks, describe
from lightning_solo.memory.events import Peak
from lightning_solo.memory.log_files import path_below_logs
from lightning_solo.memory.reading import Reading
from lightning_solo.seams import patches
from lightning_solo.seams.engines import largest
from lightning_solo.tables import Cell, Table, size, terminal
from lightning_solo.techniques.memory_logger.card import Settings
from lightning_solo.techniques.memory_logger.csv_rows import append_row, column
from lightning_solo.techniques.memory_logger.phase_peaks import PhasePeaks
from lightning_solo.units import GiB, MiB, format_bytes

_numbers = itertools.count(1)
SWAPPED = 16 * MiB
"""Growth of the swapped memory from which there is a warning; less is idle memory that the kernel moves."""


def metrics_of(
    reading: Reading, phases: Mapping[str, int] | None = None, categories: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Return the main figures, and the bytes of phases and categories, by logged key.

    >>> metrics_of(Reading(resident=GiB, peak_resident=3 * GiB), {"forward": 2 * GiB})
    {'memory/resident_gib': 1.0, 'memory/peak_resident_gib': 3.0, 'memory/forward_resident_gib': 2.0}
    """
    main = ("allocated", "peak_allocated", "reserved", "device_used", "resident", "peak_resident", "swap")
    suffix = "resident" if reading.allocated is None else "peak_allocated"
    counts: dict[str, int | None] = {name: getattr(reading, name) for name in main}
    counts |= categories or {}
    counts |= {f"{phase}_{suffix}": peak for phase, peak in (phases or {}).items()}
    metrics = {f"memory/{name}_gib": count / GiB for name, count in counts.items() if count is not None}
    if reading.alloc_retries is not None:
        metrics["memory/alloc_retries"] = float(reading.alloc_retries)
    return metrics


def _breakdown(counted: Peak | None) -> Mapping[str, int]:
    return {} if counted is None else counted.breakdown


def summary_table(title: str, counts: Mapping[str, Sequence[int]]) -> Table:
    """Return the mean, rounded down, and the largest of the bytes of each name."""
    rows = [
        (Cell(name.replace("_", " ")), size(sum(each) // len(each)), size(max(each))) for name, each in counts.items()
    ]
    return Table(title, ("", "mean", "largest"), rows)


class MemoryLogger(Callback, Settings):
    """Logs memory every ``every_n_steps`` optimizer steps, with a summary at the end, also of a failed run.

    It reads the resident set and the swapped memory of the process, and on a GPU also the CUDA allocator's counters and
    the bytes that all processes use on the device. A peak counts since the allocator's counters were last reset; this
    callback resets them only with ``per_phase``. It warns once if memory of the process is swapped out during a run.

    In a run of several processes the first one writes, and each figure is the largest of all.

    In the first ``category_steps`` steps a `memory.ledger.Ledger` splits the peak into categories, and names the
    operator and module that set it. It counts the bytes that storages request, before the allocator rounds them,
    without the batch. Compiled parts run uncompiled in these steps, with a warning, since their peak differs.

    Raises:
        PresetError: an argument is out of range, or ``file`` does not stay inside the directory.
    """

    def _init_state(self) -> None:
        self._start("", torch.device("cpu"))

    @property
    def peak_bytes(self) -> int:
        """The largest allocated (GPU) or resident (CPU) bytes read in the last run; 0 before the first.

        On a GPU the allocator's peak counts since the last reset of its counters, possibly before this run.
        """
        return max(self._counts.get("peak_allocated") or self._counts.get("resident") or [0])

    @property
    def resets_peak_counters(self) -> bool:
        """Whether the CUDA peak counters are reset during a step, so that no other callback can read a step's peak."""
        return self.per_phase

    def log_categories(self, steps: int = 1) -> None:
        """Log the peak of the next ``steps`` optimizer steps by category; a step that has begun doesn't count.

        Raises:
            PresetError: ``steps`` is out of range.
        """
        check_arguments({"steps": steps}, {"steps": Parameter(int, at_least=1)}, "memory_logger.log_categories")
        self._categories.steps_left = steps

    @property
    def category_peak(self) -> Peak | None:
        """The largest peak counted by category in the last run; None if none was counted."""
        return self._categories.largest and self._categories.largest[0]

    def _start(self, stage: str, device: torch.device) -> None:
        self._fit = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{next(_numbers)}" if stage else ""
        self._stage = stage
        self._phases = PhasePeaks(device, self.per_phase)
        self._categories = CategoryPeaks(self.category_steps)
        self._counts: dict[str, list[int]] = {}  # bytes by name, for the table
        self._path: Path | None = None
        self._step = 0  # of the last row
        self._swap: int | None = None  # bytes at the first reading; None before it, and after a warning
        self._begun = False  # whether a batch has begun
        self._writes = True  # whether this process is the run's first

    # --- when: Lightning's hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the readings for this run."""
        self._categories.discard()
        # Lightning passes an enum, and its str() is not its value
        self._start(str(getattr(stage, "value", stage)), trainer.strategy.root_device)
        self._writes = trainer.is_global_zero
        self._path = path_below_logs(trainer, self.file, "memory_logger.file", "the loggers get all of it")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a row for the memory before training, including weights."""
        self._add_row(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward phase."""
        self._begun = True
        self._phases.enter("forward")
        self._categories.enter(pl_module, trainer.optimizers, self._phases.device, trainer.global_step)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Begin the backward phase."""
        self._phases.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward phase."""
        self._phases.enter(None)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Begin the optimizer step's phase."""
        self._phases.enter("optimizer_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log if this optimizer step is due or was counted by category."""
        self._categories.leave()
        self._phases.enter(None)
        step = trainer.global_step
        counted = self._categories.take(step) if step != self._categories.first_step else None
        if counted is not None or (step != self._step and step % self.every_n_steps == 0):
            self._log(trainer, counted)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting: if ``training_step`` skipped the rest of the epoch, no hook ended its last batch."""
        self._categories.leave()

    on_train_epoch_end = on_validation_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last steps, while the model is still on its device."""
        self._categories.discard()
        if trainer.global_step != self._step:
            self._log(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record that a batch has begun."""
        self._begun = True

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the memory, if the run is not a fit."""
        if self._stage != "fit":
            self._log(trainer)

    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the table."""
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Log the memory at the failure and print the table, since Lightning calls no teardown."""
        counted = self._categories.take(trainer.global_step)
        if not self._begun:
            self._fit = ""  # nothing has run
        if self._fit:
            self._phases.enter(None)
            patches.log_metrics(trainer, self._add_row(trainer, _breakdown(counted), of_all=False))
        self._finish()

    # --- what ---

    def _log(self, trainer: Trainer, counted: Peak | None = None) -> None:
        """Add a row, and log it to every logger."""
        patches.log_metrics(trainer, self._add_row(trainer, _breakdown(counted)))

    def _add_row(
        self, trainer: Trainer, categories: Mapping[str, int] | None = None, of_all: bool = True
    ) -> dict[str, float]:
        """Add a current reading to the CSV and the table, and return its metrics.

        ``of_all``: whether each figure is the largest of all processes, each of which adds a row.
        """
        categories = categories or {}
        phases, reading = self._phases.take(), self._phases.read()
        self._warn_of_swap(reading.swap)
        self._step = trainer.global_step
        counts: dict[str, int | None] = asdict(reading) | phases
        if of_all:
            counts = largest(trainer, counts)
            categories = {name: count or 0 for name, count in largest(trainer, categories).items()}
            reading, phases = (
                Reading(**{name: counts[name] for name in asdict(reading)}),
                {name: counts[name] or 0 for name in phases},
            )
        for name, count in ({f"counted_{category}": n for category, n in categories.items()} | counts).items():
            if count is not None and name != "alloc_retries":
                self._counts.setdefault(name, []).append(count)
        row = {
            "fit": self._fit,
            "stage": self._stage,
            "device": str(self._phases.device),
            "epoch": trainer.current_epoch,
            "step": self._step,
        }
        self._write(row | {column(name): count for name, count in (counts | dict(categories)).items()})
        return metrics_of(reading, phases, categories)

    def _warn_of_swap(self, swap: int | None) -> None:
        if not self._counts:
            self._swap = swap
        if swap is not None and self._swap is not None and swap - self._swap >= SWAPPED:
            warnings.warn(
                f"MemoryLogger: {format_bytes(swap - self._swap)} of this process were swapped out since the run began,"
                " so the host's memory is full and steps wait for the disk; use fewer loader workers, or keep less in"
                " host memory (optimizer states, saved tensors)",
                stacklevel=2,
            )
            self._swap = None

    def _write(self, row: Mapping[str, object]) -> None:
        if self._path is None:
            return
        try:
            append_row(self._path, row)
        except OSError as error:
            warnings.warn(
                f"MemoryLogger: {self._path} cannot be written ({error}); this run continues without it", stacklevel=2
            )
            self._path = None

    def _finish(self) -> None:
        self._categories.discard()
        if self._fit and self.table and self._counts and self._writes:
            console = Console()
            console.print(terminal(summary_table(f"Memory, {self._stage} on {self._phases.device}", self._counts)))
            if self._categories.largest is not None:
                console.print(describe(*self._categories.largest), soft_wrap=True, markup=False)
        self._fit = ""
