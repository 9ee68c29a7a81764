"""What memory a run takes, step by step: to every logger, to a CSV, and as a table at the end.

Saves:      nothing; it observes
Costs:      one reading every ``every_n_steps`` optimizer steps; ``per_phase`` one at each phase, measured by
            examples/measure_callbacks.py; never synchronises, never empties the cache. ``category_steps``: a call in
            Python for every operator of those steps
Numerics:   bit-exact; compiled parts run uncompiled in those steps
Conflicts:  none; ``per_phase`` resets the CUDA peak counters, which others in the process may read
Reference:  https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
"""

from __future__ import annotations

import csv
import itertools
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torchmetrics import MaxMetric, MeanMetric

from lightning_solo.errors import PresetError
from lightning_solo.memory.categories import PeakWatch, compiled_parts
from lightning_solo.memory.events import CATEGORIES, Peak
from lightning_solo.memory.log_files import checked_path, path_below
from lightning_solo.memory.reading import Reading, read, resident_bytes
from lightning_solo.units import GiB, format_bytes

PHASES = ("forward", "backward", "optimizer_step")
COLUMNS = (
    *("fit", "stage", "device", "epoch", "step"),
    *(f"{field.name}_bytes".replace("retries_bytes", "retries") for field in fields(Reading)),
    *(f"{phase}_bytes" for phase in PHASES),
    *(f"{category}_bytes" for category in CATEGORIES),
)
_numbers = itertools.count(1)


def metrics_of(reading: Reading) -> dict[str, float]:
    """Return the few figures worth a curve, by logged key.

    >>> metrics_of(Reading(resident=GiB, peak_resident=3 * GiB))
    {'memory/resident_gib': 1.0, 'memory/peak_resident_gib': 3.0}
    """
    found = {
        "memory/allocated_gib": reading.allocated,
        "memory/peak_allocated_gib": reading.peak_allocated,
        "memory/reserved_gib": reading.reserved,
        "memory/resident_gib": reading.resident,
        "memory/peak_resident_gib": reading.peak_resident,
    }
    metrics = {key: count / GiB for key, count in found.items() if count is not None}
    if reading.alloc_retries is not None:
        metrics["memory/alloc_retries"] = float(reading.alloc_retries)
    return metrics


def append_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append rows of `COLUMNS` to a CSV, which gets a header when it is new.

    Raises:
        OSError: it cannot be written, or there is a file with another header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        header = file.readline()
        if header and header.strip() != ",".join(COLUMNS):
            raise OSError("it holds a table with other columns")
        writer = csv.DictWriter(file, COLUMNS)
        if not header:
            writer.writeheader()
        writer.writerows(rows)


class MemoryLogger(Callback):
    """Logs memory every so many optimizer steps, and sums it up at the end, also of a run that failed.

    On a GPU the CUDA allocator's counters, elsewhere the resident set of the process. A peak counts since the
    allocator's counters were last reset; this callback resets them only with ``per_phase``.

    What the peak of a step consists of, and which operator of which module makes it, a `memory.ledger.Ledger` counts in
    the steps asked for: storages by the bytes asked for, before the allocator rounds them, without the batch. Compiled
    parts run as written meanwhile, which is said: their own peak is another one.

    Args:
        every_n_steps: optimizer steps (``global_step``) between two readings.
        per_phase: also log the peak of forward, backward and optimizer step (on a CPU: the bytes resident at the end
            of each). Resets the CUDA peak counters between phases, so ``torch.cuda.max_memory_allocated()`` then
            tells the last phase only, to everyone in this process; the peaks reported here stay those of the whole run.
        file: CSV, relative to the first logger's directory, else to ``default_root_dir``; rows are appended, and
            column ``fit`` tells runs apart.
        table: print a table at the end.
        category_steps: optimizer steps at the start of a fit whose peak is told by category, such as 2: the first has
            no optimizer states yet. 0 by default, as these steps are slower; `log_categories` asks for more later.

    Raises:
        PresetError: an argument is out of range, or ``file`` does not stay inside the directory.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        per_phase: bool = False,
        file: str = "memory.csv",
        table: bool = True,
        category_steps: int = 0,
    ) -> None:
        super().__init__()
        self.every_n_steps = _checked_steps("every_n_steps", every_n_steps, 1)
        self.per_phase = _checked_bool("per_phase", per_phase)
        self.file = checked_path(file, *_FILE)
        self.table = _checked_bool("table", table)
        self.category_steps = _checked_steps("category_steps", category_steps, 0)
        self._watch = PeakWatch()
        self._start("")

    def __repr__(self) -> str:
        """The call that builds this callback again."""
        return (
            f"{type(self).__name__}(every_n_steps={self.every_n_steps}, per_phase={self.per_phase}, "
            f"file={self.file!r}, table={self.table}, category_steps={self.category_steps})"
        )

    @property
    def peak_bytes(self) -> int:
        """The largest allocated (GPU) or resident (CPU) bytes that the last run read; 0 before the first.

        On a GPU the allocator's peak counts since its counters were last reset, which may have been before this run.
        """
        return max(self._seen.get("peak", [0]))

    def log_categories(self, steps: int = 1) -> None:
        """Log the peak of the next ``steps`` optimizer steps by category; asked for within a step, of those after it.

        Raises:
            PresetError: ``steps`` is out of range.
        """
        self._category_steps_left = _checked_steps("log_categories(steps)", steps, 1)

    @property
    def category_peak(self) -> Peak | None:
        """The largest peak that the last run counted by category; None where it counted none."""
        return max(self._category_peaks, key=lambda found: found[1].bytes)[1] if self._category_peaks else None

    def _start(self, stage: str) -> None:
        self._watch.take()
        self._category_steps_left = self.category_steps
        self._category_peaks: list[tuple[int, Peak]] = []  # with the step that each was counted in
        self._counted_from = 0
        self._told_of_compiled = False
        self._fit = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{next(_numbers)}" if stage else ""
        self._stage = stage
        self._device = torch.device("cpu")
        self._path: Path | None = None
        self._step = 0  # of the last row
        self._phase: str | None = None
        self._peaks = dict.fromkeys(PHASES, 0)  # since the last row
        self._peak = self._peak_reserved = 0  # CUDA peaks that a reset by ``per_phase`` would have lost
        self._seen: dict[str, list[int]] = {}  # integers in the hooks; the metrics are computed for the table

    # --- when: Lightning's hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start afresh for this run."""
        self._start(str(getattr(stage, "value", stage)))  # Lightning gives an enum, whose str() is not its value
        self._device = trainer.strategy.root_device
        root = trainer.log_dir or trainer.default_root_dir
        if "://" in str(root):
            warnings.warn(
                f"MemoryLogger: {root} is remote, so there is no {self.file}; the loggers get it all", stacklevel=2
            )
        else:
            self._path = path_below(root, self.file, *_FILE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what weights and whatever was there before take."""
        self._step = trainer.global_step
        self._row(trainer, {})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forward begins."""
        if self.per_phase:
            self._enter("forward")
        if self._category_steps_left or self._watch.started:
            self._count(trainer, pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Backward begins."""
        if self.per_phase:
            self._enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward is over."""
        if self.per_phase:
            self._enter(None)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The optimizer step begins."""
        if self.per_phase:
            self._enter("optimizer_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, where an optimizer step was made and it is its turn."""
        self._watch.leave()
        if self.per_phase:
            self._enter(None)
        step = trainer.global_step
        counted = self._watch.take() if step != self._counted_from else None
        if counted is not None or (step != self._step and step % self.every_n_steps == 0):
            self._log(trainer, counted)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count no longer: a module may have skipped the rest of an epoch, within a batch that never ends."""
        self._watch.leave()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count no longer, as before a validation."""
        self._watch.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last steps, while the model is still on its device."""
        self._watch.take()
        if trainer.global_step != self._step:
            self._log(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a validation run of its own, not one inside a fit."""
        if self._stage == "validate":
            self._log(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a test run."""
        self._log(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a prediction run."""
        self._log(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Show the table."""
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Log what there was when it failed, and show the table; Lightning calls no teardown now."""
        counted = self._watch.take()
        if self._fit:
            if self.per_phase:
                self._enter(None)
            self._log(trainer, counted)
        self._finish()

    # --- what ---

    def _enter(self, phase: str | None) -> None:
        """Note the peak of the phase that ends, and begin another."""
        ended, self._phase = self._phase, phase
        if self._device.type == "cuda":
            reading = read(self._device)
            peak = reading.peak_allocated or 0
            self._peak = max(self._peak, peak)
            self._peak_reserved = max(self._peak_reserved, reading.peak_reserved or 0)
            torch.cuda.reset_peak_memory_stats(self._device)
        elif ended is not None:
            peak = resident_bytes()
        if ended is not None:
            self._peaks[ended] = max(self._peaks[ended], peak)

    def _count(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the storages of this batch, the first or another one of an optimizer step."""
        if not self._watch.started:
            self._category_steps_left -= 1
            self._counted_from = trainer.global_step
            compiled = [] if self._told_of_compiled else compiled_parts(pl_module)
            if compiled:
                self._told_of_compiled = True
                warnings.warn(
                    f"MemoryLogger: compiled: {', '.join(compiled)}; in the steps whose categories are counted it runs "
                    "as written, so its activations and temporaries are those of the uncompiled code: what the "
                    "compiled code holds is not seen",
                    stacklevel=2,
                )
        optimizers = [one for one in trainer.optimizers if isinstance(one, torch.optim.Optimizer)]
        self._watch.enter(pl_module, optimizers, self._device)

    def _log(self, trainer: Trainer, counted: Peak | None = None) -> None:
        phases = {phase: peak for phase, peak in self._peaks.items() if peak}
        self._peaks = dict.fromkeys(PHASES, 0)
        self._step = trainer.global_step
        categories: dict[str, int] = {} if counted is None else counted.breakdown
        if counted is not None:
            self._category_peaks.append((self._step, counted))
        metrics = self._row(trainer, phases, categories)
        metrics |= {f"memory/{category}_gib": held / GiB for category, held in categories.items()}
        suffix = "peak_allocated_gib" if self._device.type == "cuda" else "resident_gib"
        metrics |= {f"memory/{phase}_{suffix}": peak / GiB for phase, peak in phases.items()}
        for logger in trainer.loggers:
            # straight to the logger: the module's own keys and aggregation are left alone; the axis is self.log()'s
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _row(
        self, trainer: Trainer, phases: Mapping[str, int], categories: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        reading = self._whole_run(read(self._device))
        categories = categories or {}
        for category, held in categories.items():
            self._seen.setdefault(f"counted_{category}", []).append(held)
        for name, count in (*asdict(reading).items(), *phases.items()):
            if count is not None and name != "alloc_retries":
                self._seen.setdefault(name, []).append(count)
        peak = reading.peak_allocated if reading.resident is None else reading.resident
        self._seen.setdefault("peak", []).append(peak or 0)
        row: dict[str, object] = {
            "fit": self._fit,
            "stage": self._stage,
            "device": str(self._device),
            "epoch": trainer.current_epoch,
            "step": self._step,
            **dict(zip(COLUMNS[5:], asdict(reading).values(), strict=False)),
            **{f"{part}_bytes": held for part, held in (*phases.items(), *categories.items())},
        }
        self._write(row)
        return metrics_of(reading)

    def _whole_run(self, reading: Reading) -> Reading:
        """Return the reading with the peaks that our own resets hid."""
        if reading.peak_allocated is None or reading.peak_reserved is None:
            return reading
        peaks = {
            "peak_allocated": max(reading.peak_allocated, self._peak),
            "peak_reserved": max(reading.peak_reserved, self._peak_reserved),
        }
        return Reading(**{**asdict(reading), **peaks})

    def _write(self, row: Mapping[str, object]) -> None:
        if self._path is None:
            return
        try:
            append_rows(self._path, [row])
        except OSError as error:
            warnings.warn(
                f"MemoryLogger: {self._path} cannot be written ({error}); this run goes on without it", stacklevel=2
            )
            self._path = None

    def _finish(self) -> None:
        self._watch.take()
        if self._fit and self.table and self._seen:
            print_table(self._rows(), f"Memory, {self._stage} on {self._device}", self._counted_words())
        self._fit = ""

    def _counted_words(self) -> str:
        if not self._category_peaks:
            return ""
        step, peak = max(self._category_peaks, key=lambda found: found[1].bytes)
        return words_of(peak, step)

    def _rows(self) -> dict[str, tuple[int, int]]:
        """Return the mean and the largest bytes of what was read, by name."""
        rows = {}
        for name, counts in self._seen.items():
            # float64 holds every byte count exactly up to 2**53; the default float32 only up to 16 MiB
            mean, largest = MeanMetric().set_dtype(torch.float64), MaxMetric().set_dtype(torch.float64)
            mean.update(counts)
            largest.update(counts)
            rows[name.replace("_", " ")] = (int(mean.compute()), int(largest.compute()))
        rows.pop("peak", None)
        return rows


def words_of(peak: Peak, step: int) -> str:
    """Return in words where the peak of an optimizer step was.

    >>> words_of(Peak(3 * GiB, {}, "aten.mm.default", "net.head"), 2)
    'counted peak 3.00 GiB, optimizer step 2: made by aten.mm.default in net.head'
    """
    if not peak.operator:
        return f"counted peak {format_bytes(peak.bytes)}, optimizer step {step}: at its start"
    where = f"in {peak.module}" if peak.module else "outside of the module's parts"
    return f"counted peak {format_bytes(peak.bytes)}, optimizer step {step}: made by {peak.operator} {where}"


def print_table(rows: Mapping[str, tuple[int, int]], title: str, below: str = "") -> None:
    """Print the mean and the largest bytes of each row as a table, and a line below it."""
    table = Table(title=title)
    for heading in ("", "mean", "largest"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, (mean, largest) in rows.items():
        table.add_row(name, format_bytes(mean), format_bytes(largest))
    console = Console()
    console.print(table)
    if below:
        console.print(below, soft_wrap=True, markup=False)


_FILE = "memory_logger.file", "memory/run.csv"


def _checked_steps(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PresetError(f"memory_logger.{name}={value!r}: allowed is an integer >= {least}")
    return value


def _checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise PresetError(f"memory_logger.{name}={value!r}: allowed are true and false")
    return value
