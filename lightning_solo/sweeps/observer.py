"""A callback in every Trainer of a sweep's job, which writes step, loss and memory for the sweep."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import write_json
from lightning_solo.sweeps.files import JobFiles, SweepFolder
from lightning_solo.sweeps.job_process import VARIABLE, peaks
from lightning_solo.sweeps.results import loss_of

EVERY_S = 1.0
ENTRY_POINTS = f"""\
[lightning.pytorch.callbacks_factory]
sweep = {__name__}:callbacks_for_lightning
[pytorch_lightning.callbacks_factory]
sweep = {__name__}:callbacks_for_pytorch_lightning
"""


def announce(folder: Path) -> None:
    """Write the metadata of a package by which Lightning adds the observer to every Trainer that finds the folder."""
    package = folder / "lightning_solo_job-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-solo-job\nVersion: 1\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)


def callbacks(home: str) -> list[Any]:
    """Return the observer of this process's job, for a Trainer of a home of Lightning."""
    return [observer(home, Path(os.environ[VARIABLE]))]


callbacks_for_lightning = partial(callbacks, "lightning.pytorch")
callbacks_for_pytorch_lightning = partial(callbacks, "pytorch_lightning")


def observer(home: str, path: Path) -> Any:
    """Return an observer for the Trainers of a home of Lightning; it can be pickled into a Trainer's own processes."""
    base = importlib.import_module(home).Callback

    def reduce(self: Any) -> Any:
        return observer, (home, path)

    cls = type("JobObserver", (JobObserver, base), {"__module__": __name__, "__reduce__": reduce})
    return cls(JobFiles(path))


class JobObserver:
    """Writes `progress.json` about once a second, and at the start and end of each run of the Trainer."""

    def __init__(self, files: JobFiles) -> None:
        self._files = files
        self._pruning: Any = None
        if SweepFolder(files.path.parents[2]).pruning.exists():
            from lightning_solo.sweeps.pruning import pruning_of

            self._pruning = pruning_of(files.path)
        self._written = 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write the progress, at most once a second."""
        if time.monotonic() - self._written >= EVERY_S:
            self.write(trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Report to the search whose trial this is; a pruned trial ends as after its last step."""
        if self._pruning is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pruning.report(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Report here where nothing is validated."""
        if self._pruning is not None and not trainer.enable_validation:
            self._pruning.report(trainer)

    def write(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Write the progress: the steps so far and in all, the metrics of this run of the Trainer, and the memory."""
        self._written = time.monotonic()
        try:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()} | figures(trainer)
            write_json(
                self._files.progress,
                {
                    "step": trainer.global_step,
                    "of_steps": total_steps(trainer),
                    "loss": loss_of(metrics),
                    "metrics": metrics,
                    "pruned_at": self._pruning and self._pruning.pruned_at,
                    **peaks(),
                },
                durable=False,
            )
        except Exception:  # neither a full disk nor a lost device may end the run from here
            return

    on_train_start = on_exception = teardown = write


def figures(trainer: Any) -> dict[str, float]:
    """Return the ``figures`` of the callbacks that have such a mapping of numbers: they log them to loggers alone."""
    mappings = [getattr(callback, "figures", None) for callback in trainer.callbacks]
    return {
        str(key): float(value)
        for mapping in mappings
        if isinstance(mapping, Mapping)
        for key, value in mapping.items()
        if isinstance(value, (int, float))
    }


def total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps that a run will take, or None where that is unknown."""
    try:
        steps = trainer.estimated_stepping_batches
    except Exception:  # before there is a loader, or under a strategy that doesn't know
        return None
    return int(steps) if 0 < steps < float("inf") else None
