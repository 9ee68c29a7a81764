"""A callback in every Trainer of a sweep's job, which writes step, loss and memory for the sweep.

Imported only by a job's Trainers, which find `callbacks` by an entry point (entry_points/).
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import read_json, write_json
from lightning_solo.seams.homes import default_home
from lightning_solo.sweeps.files import JobFiles, SweepFolder
from lightning_solo.sweeps.job_process import VARIABLE, peaks
from lightning_solo.sweeps.results import loss_of

EVERY_S = 1.0
Callback: Any = importlib.import_module(default_home()).Callback


def callbacks() -> list[Any]:
    """Return the observer of this process's job."""
    return [JobObserver(Path(os.environ[VARIABLE]))]


class JobObserver(Callback):  # type: ignore[misc]
    """Writes `progress.json` about once a second, and at the start and end of each run of the Trainer.

    Args:
        path: the folder of the job's `JobFiles`.
    """

    def __init__(self, path: Path) -> None:
        self._files = JobFiles(path)
        self._pruning: Any = None
        if SweepFolder(path.parents[2]).pruning.exists():
            from lightning_solo.sweeps.pruning import pruning_of

            self._pruning = pruning_of(path)
        self._written = 0.0
        self._has_trained = False

    def __reduce__(self) -> Any:  # into a Trainer's own processes
        return JobObserver, (self._files.path,)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Write the progress."""
        self._has_trained = True
        self.write(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write the progress, at most once a second."""
        if time.monotonic() - self._written >= EVERY_S:
            self.write(trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Report to this trial's search; a pruned trial ends in the same way as one that took all steps."""
        if self._pruning is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pruning.report(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Report after an epoch if the Trainer doesn't validate."""
        if self._pruning is not None and not trainer.enable_validation:
            self._pruning.report(trainer)

    def write(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Write the steps done and planned, the metrics, and the memory.

        A fit's metrics replace the earlier ones. A resumed fit that had ended already trains nothing and keeps those of
        the former attempt. A test or validation after a fit, also by another Trainer, adds its own.
        """
        self._written = time.monotonic()
        try:
            before = self._files.former if trainer.state.fn == "fit" else self._files.progress
            has_fitted = trainer.state.fn == "fit" and self._has_trained
            fitted = {} if has_fitted else read_json(before) or {}
            metrics = dict(fitted.get("metrics", {}))
            metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()} | figures(trainer)
            write_json(
                self._files.progress,
                {
                    "step": trainer.global_step,
                    "of_steps": total_steps(trainer),
                    "pruned_at": self._pruning and self._pruning.pruned_at,
                    **fitted,
                    "loss": loss_of(metrics),
                    "metrics": metrics,
                    **peaks(),
                },
                durable=False,
            )
        except Exception:  # a full disk or a lost device must not end the run here
            return

    on_exception = teardown = write


def job_metrics() -> dict[str, float]:
    """Return the metrics of this process's job so far; empty if it is none of a sweep's."""
    if VARIABLE not in os.environ:
        return {}
    progress = read_json(JobFiles(Path(os.environ[VARIABLE])).progress) or {}
    return dict(progress.get("metrics", {}))


def figures(trainer: Any) -> dict[str, float]:
    """Return the ``figures`` mappings of callbacks, merged: numbers that they log only to loggers."""
    mappings = [getattr(callback, "figures", None) for callback in trainer.callbacks]
    return {
        str(key): float(value)
        for mapping in mappings
        if isinstance(mapping, Mapping)
        for key, value in mapping.items()
        if isinstance(value, (int, float))
    }


def total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps that a run will take, or None if unknown."""
    try:
        steps = trainer.estimated_stepping_batches
    except Exception:  # there is no loader yet, or the strategy doesn't know
        return None
    return int(steps) if 0 < steps < float("inf") else None
