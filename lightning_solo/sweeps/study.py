"""The study of a search: opens it, draws the parameters of trials, describes its result."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial
from sqlalchemy.exc import SQLAlchemyError

from lightning_solo.attributes import switched
from lightning_solo.errors import CheckpointError
from lightning_solo.sweeps.pruning import STUDY, storage
from lightning_solo.sweeps.search_settings import Settings
from lightning_solo.sweeps.search_space import SearchSpace
from lightning_solo.units import GiB

IDENTITY = "lightning_solo"
"""Name of the study's attribute with its objectives and search space."""


def open_study(folder: Path, settings: Settings, space: SearchSpace) -> Study:
    """Return the study of a sweep's folder; create it if there is none.

    Raises:
        CheckpointError: the study there has another name or space, or the file can't be read.
    """
    name = settings.study_name or folder.absolute().name
    identity = {
        "objectives": dict(zip(settings.objectives, settings.direction, strict=True)),
        "searched": space.described(),
        "overrides": dict.fromkeys(sorted(space.fixed), "given"),
    }
    try:
        database = storage(folder, new=True)
        names = optuna.get_all_study_names(database)
    except (SQLAlchemyError, RuntimeError, optuna.exceptions.OptunaError) as error:
        why = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{folder / STUDY}: not a study that Optuna {optuna.__version__} can read ({why}); give the sweep another"
            " folder"
        ) from error
    if names and names != [name]:
        raise CheckpointError(
            f"{folder / STUDY} holds the study {', '.join(names)}, not {name}; write"
            f" hydra.sweeper.study_name={names[0]}, or give the sweep another folder"
        )
    directions: Any = list(settings.direction)
    study = optuna.create_study(storage=database, study_name=name, directions=directions, load_if_exists=True)
    before = study.user_attrs.get(IDENTITY)
    if before is None:
        study.set_user_attr(IDENTITY, identity)
    elif before != identity:
        raise CheckpointError(
            f"{folder / STUDY}: a study with other parameters:{differences(before, identity)}\ngive the former ones to"
            " resume it, or another name for a new one: run=..., or in an application of your own hydra.sweep.dir=..."
        )
    return study


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a line for each difference between two studies' identities."""
    lines = [
        f"\n  {key}: {before.get(part, {}).get(key, 'not there')} before, {now[part].get(key, 'not there')} now"
        for part in now
        for key in sorted({*before.get(part, {}), *now[part]})
        if before.get(part, {}).get(key) != now[part].get(key)
    ]
    return "".join(lines) or " their order"


def suggest(trial: Trial, space: SearchSpace) -> None:
    """Draw the parameters that a trial lacks; an interruption between two draws doesn't change them."""
    for name, distribution in space.distributions.items():
        if name in trial.params and name not in trial.relative_params and not distribution.single():
            # stored by a killed command: draw it again, so that the sampler's next draw is the usual one
            frozen = trial.study.trials[trial.number]
            trial.study.sampler.sample_independent(trial.study, frozen, name, distribution)
        if isinstance(distribution, CategoricalDistribution):
            trial.suggest_categorical(name, distribution.choices)
        elif isinstance(distribution, IntDistribution):
            trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
        elif isinstance(distribution, FloatDistribution):
            trial.suggest_float(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def describe(
    study: Study, best: Sequence[FrozenTrial], objectives: Sequence[str], space: SearchSpace, file: Path
) -> str:
    """Return the result of a study as text."""
    states = Counter(trial.state.name.lower() for trial in study.get_trials(deepcopy=False))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    lines = [f"{sum(states.values())} trials: {counts}"]
    for trial in best:
        pairs = zip(objectives, trial.values, strict=True)
        values = ", ".join(
            f"{name} {value / GiB:.3f} GiB" if name == "peak_memory" else f"{name} {value:.6g}" for name, value in pairs
        )
        searched = space.overrides(trial.params)[len(space.fixed) :]
        lines.append(f"best: trial {trial.number}, {values}: {shlex.join(searched)}")
    return "\n".join([*lines, f"study: sqlite:///{file}"])


def quiet() -> AbstractContextManager[None]:
    """Silence Optuna's lines about each trial, which repeat the sweep's."""
    return switched(optuna.logging.get_verbosity, optuna.logging.set_verbosity, optuna.logging.WARNING)


def summary(best: Sequence[FrozenTrial]) -> dict[str, Any]:
    """Return the best trials in the form of Hydra's own Optuna plugin."""
    if len(best) == 1 and len(best[0].values) == 1:
        return {"name": "optuna", "best_params": best[0].params, "best_value": best[0].value}
    return {"name": "optuna", "solutions": [{"params": t.params, "values": t.values} for t in best]}
