"""The settings of a search: its objectives, how trials are chosen, and which of them are ended early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import ListConfig
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler

from lightning_solo.errors import ConflictError, PresetError, nearest
from lightning_solo.sweeps.results import Row

SAMPLERS: dict[str, Callable[[int | None], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed, constant_liar=True),  # trials at the same time keep apart
    "random": lambda seed: RandomSampler(seed=seed),
    "nsga2": lambda seed: NSGAIISampler(seed=seed),
}
VALUE = "value"
OBJECTIVES: dict[str, Callable[[Row], float | None]] = {
    VALUE: lambda row: number(row.returned),
    "peak_memory": lambda row: row.peak_host_bytes if row.peak_device_bytes is None else row.peak_device_bytes,
    "seconds": lambda row: row.seconds,
}
DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True)
class Settings:
    """The settings of `hydra.sweeper`.

    Attributes:
        n_trials: of the study, those of earlier commands and failed ones included.
        n_jobs: trials that are drawn at a time; None for as many as the launcher runs at a time.
        direction: minimize or maximize, or a list of them: one per objective.
        objectives: value, which the task function returns; peak_memory and seconds, which the sweep measures. None for
            value alone, or for value and peak_memory where there are two directions.
        sampler: tpe, random or nsga2.
        seed: of the sampler; None draws one.
        pruning: whether trials that do worse than the median of the earlier ones are ended, by Lightning.
        monitor: the metric by which trials are pruned; None for the validation's loss.
        prune_after_trials: finished trials before the first is ended.
        prune_after_steps: optimizer steps, or epochs for a Trainer that validates once in each, before one is ended.
        study_name: None for the name of the sweep's folder.
    """

    n_trials: int
    n_jobs: int
    direction: Sequence[str]
    objectives: Sequence[str]
    sampler: str
    seed: int | None
    pruning: bool
    monitor: str | None
    prune_after_trials: int
    prune_after_steps: int
    study_name: str | None

    def __post_init__(self) -> None:
        least = {"n_trials": 1, "n_jobs": 1, "prune_after_trials": 0, "prune_after_steps": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise PresetError(f"hydra.sweeper.{name}={getattr(self, name)}: must be {lowest} or more")
        if self.seed is not None and self.seed < 0:
            raise PresetError(f"hydra.sweeper.seed={self.seed}: must be 0 or more, or null for another one each time")
        known = {"sampler": SAMPLERS, "direction": DIRECTIONS, "objectives": OBJECTIVES}
        for name, allowed in known.items():
            value = getattr(self, name)
            for word in [value] if isinstance(value, str) else value:
                if word not in allowed:
                    raise PresetError(
                        f"hydra.sweeper.{name}={word}: unknown{nearest(str(word), allowed)}one of {', '.join(allowed)}"
                    )
        if len(self.direction) != len(self.objectives) or len(set(self.objectives)) != len(self.objectives):
            raise ConflictError(
                f"hydra.sweeper.direction={_list(self.direction)} and objectives={_list(self.objectives)}: one"
                " direction per objective, each objective once, such as direction=[minimize,minimize]"
                " objectives=[value,peak_memory]"
            )
        if self.pruning and len(self.direction) > 1:
            raise ConflictError(
                f"hydra.sweeper.pruning=true and objectives={_list(self.objectives)}: Optuna can't say which of two"
                " trials is the better one; write hydra.sweeper.pruning=false, or search for one objective"
            )
        if self.pruning and VALUE not in self.objectives:
            raise ConflictError(
                f"hydra.sweeper.pruning=true and objectives={_list(self.objectives)}: a metric says nothing about it;"
                " write hydra.sweeper.pruning=false or objectives=[value]"
            )
        if self.pruning and self.monitor is None and tuple(self.direction) != ("minimize",):
            raise PresetError(
                "hydra.sweeper.pruning=true and direction=maximize: name the metric to be maximized, such as"
                " hydra.sweeper.monitor=val_accuracy"
            )


def settings(options: Mapping[str, Any], parallel: int) -> Settings:
    """Return the settings of Hydra's section, with their defaults in the place of None.

    Raises:
        PresetError: a value is out of range.
        ConflictError: two values can't be combined.
    """
    plain = {name: list(v) if isinstance(v, ListConfig | list | tuple) else v for name, v in options.items()}
    directions = plain["direction"] if isinstance(plain["direction"], list) else [plain["direction"]]
    objectives = plain["objectives"] or [VALUE, "peak_memory"][: len(directions)]
    if len(directions) == 1:  # one word for all
        directions = directions * len(objectives)
    n_jobs = parallel if plain["n_jobs"] is None else plain["n_jobs"]
    filled: dict[str, Any] = {**plain, "direction": directions, "objectives": objectives, "n_jobs": n_jobs}
    return Settings(**filled)


def number(value: object) -> float | None:
    """Return a number as a float, and None for anything else.

    >>> number(2), number(True), number("2"), number(None)
    (2.0, None, None, None)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _list(words: Sequence[str]) -> str:
    return f"[{','.join(words)}]"
