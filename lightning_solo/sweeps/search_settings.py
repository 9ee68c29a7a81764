"""The settings of a search: its objectives, the choice of trials, and pruning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_solo.errors import ConflictError, PresetError, nearest
from lightning_solo.sweeps.jobs import check_least, check_names
from lightning_solo.sweeps.results import Row, number

VALUE = "value"
OBJECTIVES: dict[str, Callable[[Row], float | None]] = {
    VALUE: lambda row: number(row.returned),
    "peak_memory": lambda row: row.peak_host_bytes if row.peak_device_bytes is None else row.peak_device_bytes,
    "seconds": lambda row: row.seconds,
}
ALLOWED = {
    "sampler": ("tpe", "random", "nsga2"),
    "direction": ("minimize", "maximize"),
    "objectives": tuple(OBJECTIVES),
}


@dataclass
class Settings:
    """The settings of `hydra.sweeper`."""

    n_trials: int = 20  # number of trials in the study, including failed ones and those of earlier commands
    n_jobs: int = 1  # trials that are drawn at a time
    direction: list[str] = field(default_factory=lambda: ["minimize"])  # minimize or maximize, one per objective
    # value, returned by the task function; peak_memory and seconds, measured by the sweep
    objectives: list[str] = field(default_factory=lambda: [VALUE])
    sampler: str = "tpe"
    seed: int | None = 0  # seed of the sampler; None draws one
    pruning: bool = False  # whether Lightning ends trials that do worse than the median of earlier ones
    monitor: str | None = None  # the metric for pruning; None for the validation loss
    prune_after_trials: int = 5  # finished trials before the first one is pruned
    # optimizer steps, or epochs for a Trainer that validates once in each, before a trial is pruned
    prune_after_steps: int = 0
    study_name: str | None = None  # None for the name of the sweep's folder


def settings(options: Mapping[str, Any], parallel: int) -> Settings:
    """Return the checked settings of Hydra's section.

    In the section ``n_jobs`` may be None for ``parallel``, the number of jobs the launcher runs at a time;
    ``direction`` may be one word for all objectives; and ``objectives`` may be None for value, or with two directions
    for value and peak_memory.

    Raises:
        PresetError: a value is out of range.
        ConflictError: two values can't be combined.
    """
    check_names("sweeper", options, Settings)
    n_jobs, direction, objectives = (options[name] for name in ("n_jobs", "direction", "objectives"))
    directions = [direction] if isinstance(direction, str) else list(direction)
    objectives = list(objectives or [VALUE, "peak_memory"][: len(directions)])
    checked = Settings(
        **{
            **options,
            "n_jobs": parallel if n_jobs is None else n_jobs,
            "direction": directions * len(objectives) if len(directions) == 1 else directions,
            "objectives": objectives,
        }
    )
    check_least("sweeper", checked, n_trials=1, n_jobs=1, prune_after_trials=0, prune_after_steps=0)
    if checked.seed is not None and checked.seed < 0:
        raise PresetError(f"hydra.sweeper.seed={checked.seed}: must be 0 or more, or null for another one each time")
    for name, allowed in ALLOWED.items():
        value = getattr(checked, name)
        for word in [value] if isinstance(value, str) else value:
            if word not in allowed:
                raise PresetError(
                    f"hydra.sweeper.{name}={word}: unknown{nearest(str(word), allowed)}one of {', '.join(allowed)}"
                )
    _refuse_conflicts(checked)
    return checked


def _refuse_conflicts(checked: Settings) -> None:
    objectives = checked.objectives
    listed = f"objectives=[{','.join(objectives)}]"
    if len(checked.direction) != len(objectives) or len(set(objectives)) != len(objectives):
        raise ConflictError(
            f"hydra.sweeper.direction=[{','.join(checked.direction)}] and {listed}: one direction per objective, each"
            " objective once, such as direction=[minimize,minimize] objectives=[value,peak_memory]"
        )
    if not checked.pruning:
        return
    if len(objectives) > 1:
        raise ConflictError(
            f"hydra.sweeper.pruning=true and {listed}: pruning needs a single objective; write"
            " hydra.sweeper.pruning=false, or search for one objective"
        )
    if VALUE not in objectives:
        raise ConflictError(
            f"hydra.sweeper.pruning=true and {listed}: no reported metric predicts it; write"
            " hydra.sweeper.pruning=false or objectives=[value]"
        )
    if checked.monitor is None and checked.direction != ["minimize"]:
        raise PresetError(
            "hydra.sweeper.pruning=true and direction=maximize: name the metric to be maximized, such as"
            " hydra.sweeper.monitor=val_accuracy"
        )
