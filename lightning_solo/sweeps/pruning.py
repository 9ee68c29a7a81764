"""The part of a search inside a job: the Trainer reports to the study and stops if the study prunes the trial.

Imported in a job's process if its sweep prunes. The study is in the sweep's folder; a trial has its job's number.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage

from lightning_solo.atomic_files import read_json
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.results import is_validation_loss

STUDY = "optuna.db"
LOCKED_S = 60.0
"""Seconds to wait for another process that writes to the study."""


def storage(folder: Path, *, new: bool) -> RDBStorage:
    """Return the study's storage in a sweep's folder; ``new``: create its tables if they are missing."""
    path = str((folder / STUDY).absolute()).replace("{", "{{").replace("}", "}}")  # Optuna formats the address
    waits = {"connect_args": {"timeout": LOCKED_S}}
    return RDBStorage(f"sqlite:///{path}", waits, skip_compatibility_check=not new, skip_table_creation=not new)


class Pruning:
    """Reports a trial's metric to its study, and stops the Trainer if the study prunes the trial.

    Args:
        job: the folder of the job's `JobFiles`, in a sweep that prunes.

    Attributes:
        pruned_at: the step of the study at which the trial was pruned; None for a trial that continues.
    """

    def __init__(self, job: Path) -> None:
        sweep = SweepFolder(job.parents[2])
        settings = read_json(sweep.pruning) or {}
        self.monitor: str | None = settings["monitor"]
        self.pruned_at: int | None = None
        study = optuna.load_study(
            study_name=settings["study"],
            storage=storage(sweep.path, new=False),
            sampler=optuna.samplers.RandomSampler(),  # nothing is drawn here
            pruner=optuna.pruners.MedianPruner(settings["after_trials"], settings["after_steps"]),
        )
        frozen = study.get_trials(deepcopy=False)[int(job.name)]
        self._reported = set(frozen.intermediate_values)  # by an interrupted attempt
        self._trial = optuna.trial.Trial(study, frozen._trial_id)

    def report(self, trainer: Any) -> None:
        """Report the monitored metric, and stop the Trainer if the trial is pruned."""
        value = self.monitored(trainer.callback_metrics)
        if self.pruned_at is None and value is not None:
            step = step_of(trainer)
            try:
                if step not in self._reported:
                    self._reported.add(step)
                    self._trial.report(value, step)
                if self._trial.should_prune():
                    self.pruned_at = step
            except OptunaError as error:  # an unreachable study must not end the run
                warnings.warn(f"{STUDY}: nothing reported at {step}: {error}", stacklevel=2)
        if self.pruned_at is not None:
            trainer.should_stop = True

    def monitored(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the monitored metric: by default the first validation loss, by its name."""
        for name, value in metrics.items():
            if name == self.monitor or (self.monitor is None and is_validation_loss(name)):
                return float(value)
        return None


pruning_of = functools.cache(Pruning)  # one per job: a job with several Trainers is still one trial


def step_of(trainer: Any) -> int:
    """Return a Trainer's epochs if it validates once in each, so that any batch size compares, else its steps."""
    interval = trainer.val_check_interval  # 1.0 is once per epoch, 1 is after every batch
    by_epoch = trainer.check_val_every_n_epoch is not None and isinstance(interval, float) and interval == 1.0
    return int(trainer.current_epoch + 1 if by_epoch else trainer.global_step)
