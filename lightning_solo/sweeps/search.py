"""A search by Optuna: each job is a trial with the job's number, in a study that the same command resumes.

A trial's parameters are stored before its job starts. After a command was killed, the next one passes the study's
running trials to the launcher, which knows how their jobs ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_solo.atomic_files import read_json, write_json
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.sweeps import results
from lightning_solo.sweeps.display import failures
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.gpus import devices_of
from lightning_solo.sweeps.launch import JobsFailed
from lightning_solo.sweeps.outcome import FINISHED, INTERRUPTED
from lightning_solo.sweeps.pruning import STUDY
from lightning_solo.sweeps.results import Row, number
from lightning_solo.sweeps.search_settings import OBJECTIVES, VALUE, settings
from lightning_solo.sweeps.search_space import SearchSpace, search_space
from lightning_solo.sweeps.study import describe, open_study, quiet, suggest, summary


class Search:
    """Runs the trials of a study, for one command.

    Raises:
        PresetError: a setting is out of range.
        ConflictError: settings that can't be combined, or a launcher other than ``solo``.
    """

    def __init__(
        self, hydra_context: HydraContext, task: TaskFunction, config: DictConfig, options: Mapping[str, Any]
    ) -> None:
        if not str(config.hydra.launcher.get("_target_")).endswith(".SoloLauncher"):
            raise ConflictError(
                "hydra/sweeper=solo_optuna: it reads each trial's value and cost from the results of"
                " hydra/launcher=solo; write both"
            )
        if config.hydra.launcher.rerun != "never":
            raise ConflictError(
                f"hydra.launcher.rerun={config.hydra.launcher.rerun} and hydra/sweeper=solo_optuna: a trial that has"
                " ended is not run again; write a larger hydra.sweeper.n_trials for more trials"
            )
        if options["pruning"]:
            with read_write(config), open_dict(config):
                config.hydra.launcher.preload = [*config.hydra.launcher.preload, "lightning_solo.sweeps.pruning"]
        self.config = config
        self.loader: ConfigLoader = hydra_context.config_loader
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task, config=config
        )
        self.settings = settings(options, self.launcher.parallel)  # type: ignore[attr-defined]
        self.folder = SweepFolder(Path(config.hydra.sweep.dir))

    def __call__(self, arguments: Sequence[str]) -> None:
        """Run the trials that the study lacks, and print its result.

        Raises:
            NothingToDoError: there is nothing to search.
            PresetError: the space can't be searched, or the task function returned no number.
            CheckpointError: the folder holds another study, or another command works on it.
            JobsFailed: some jobs failed; raised at the end.
        """
        space = search_space(arguments, self.loader)
        # refuse an unknown key or choice before the study stores it
        samples = [self.loader.load_sweep_config(self.config, overrides) for overrides in space.samples()]
        shared_out = self.config.hydra.launcher.gpus is not None
        self._count_devices(max(devices_of(sample, shared_out) for sample in samples), shared_out)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        with quiet(), self.launcher.kept(range(self.settings.n_trials)):
            study = open_study(self.folder.path, self.settings, space)
            OmegaConf.save(self.config, self.folder.path / "multirun.yaml")
            self._write_pruning(study)
            left: set[int] = set()
            while trials := self._next(study, left):
                for frozen in trials:
                    # parameters are stored one by one; a killed command may have stored only some of a trial's
                    study.sampler = self._sampler(frozen.number)
                    suggest(Trial(study, frozen._trial_id), space)
                left |= self._run(study, space, [frozen.number for frozen in trials])
        self._conclude(study, space)

    def _count_devices(self, devices: int, shared_out: bool) -> None:
        """Draw as many trials of several devices at once as run at the same time."""
        if devices > 1 and self.settings.pruning:
            raise ConflictError(
                f"hydra.sweeper.pruning=true with jobs on {devices} devices: only one of a job's processes would end;"
                " write hydra.sweeper.pruning=false"
            )
        if self.config.hydra.sweeper.n_jobs is None and shared_out:
            self.settings = replace(self.settings, n_jobs=max(self.settings.n_jobs // devices, 1))

    def _next(self, study: Study, left: set[int]) -> list[FrozenTrial]:
        """Return the running trials, of this command or a killed one; if there are none, new ones."""

        def running() -> list[FrozenTrial]:
            trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            return [trial for trial in trials if trial.number not in left]

        if not running():
            count = sum(trial.state != TrialState.WAITING for trial in study.get_trials(deepcopy=False))
            for number in range(count, min(count + self.settings.n_jobs, self.settings.n_trials)):
                study.sampler = self._sampler(number)
                study.ask()
        return running()

    def _sampler(self, trial: int) -> BaseSampler:
        """Return the sampler for one trial; its draws don't depend on how often the command was started."""
        seed = self.settings.seed
        of_trial = None if seed is None else int(np.random.SeedSequence([seed, trial]).generate_state(1)[0])
        if self.settings.sampler == "tpe":
            return TPESampler(seed=of_trial, constant_liar=True)  # so that parallel trials differ
        return (RandomSampler if self.settings.sampler == "random" else NSGAIISampler)(seed=of_trial)

    def _run(self, study: Study, space: SearchSpace, numbers: Sequence[int]) -> set[int]:
        """Run trials and store their results; return those that the same command should run again later."""
        params = {trial.number: trial.params for trial in study.get_trials(deepcopy=False)}
        for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
            successive = [number for _, number in group]  # a launcher numbers its jobs consecutively
            self.launcher.launch([space.overrides(params[number]) for number in successive], successive[0])
        rows = self._rows()
        again = {trial for trial in numbers if rows[trial].status == INTERRUPTED}
        for trial in sorted({*numbers} - again):
            self._settle(study, rows[trial])
        return again

    def _rows(self) -> dict[int, Row]:
        return {row.number: row for row in results.read(self.folder.results)}

    def _settle(self, study: Study, row: Row) -> None:
        progress = read_json(self.folder.job(row.number).progress) or {}
        values = [OBJECTIVES[name](row) for name in self.settings.objectives]
        if row.status == FINISHED and progress.get("pruned_at") is not None:
            study.tell(row.number, state=TrialState.PRUNED)
            return
        if row.status == FINISHED and all(value is not None and not math.isnan(value) for value in values):
            study.tell(row.number, [float(value) for value in values if value is not None])
        else:
            study.tell(row.number, state=TrialState.FAIL)
        if row.status == FINISHED and VALUE in self.settings.objectives and number(row.returned) is None:
            detail = f"returned {row.returned!r} {row.detail}".strip() + ": a search needs a number"
            results.append(self.folder.results, replace(row, status="failed", detail=detail))
            raise PresetError(
                f"job {row.number} {detail}; return it from the task function, such as"
                " float(trainer.callback_metrics['validation/loss']), which exists after a validation;"
                " `lightning-solo train` returns the metric hydra.sweeper.monitor, here one of"
                f" {', '.join(sorted(row.metrics)) or 'none'}"
            )

    def _write_pruning(self, study: Study) -> None:
        s = self.settings
        if not s.pruning:
            self.folder.pruning.unlink(missing_ok=True)
            return
        after = {"after_trials": s.prune_after_trials, "after_steps": s.prune_after_steps}
        write_json(self.folder.pruning, {"study": study.study_name, "monitor": s.monitor, **after})

    def _conclude(self, study: Study, space: SearchSpace) -> None:
        trials = study.get_trials(deepcopy=False)
        best = study.best_trials if len(study.directions) > 1 else study.best_trials[:1]  # empty if none has finished
        OmegaConf.save(OmegaConf.create(summary(best)), self.folder.path / "optimization_results.yaml")
        print(describe(study, best, self.settings.objectives, space, self.folder.path / STUDY))
        rows = [row for trial, row in self._rows().items() if trial < len(trials)]
        if self.settings.pruning and trials and not any(trial.intermediate_values for trial in trials):
            names = sorted({name for row in rows for name in row.metrics})
            print(
                f"hydra.sweeper.pruning=true: no trial reported {self.settings.monitor or 'a validation loss'}, so none"
                f" was pruned; there are {', '.join(names) or 'no metrics'}; write hydra.sweeper.monitor=<one of them>"
            )
        if any(row.status != FINISHED for row in rows):
            raise JobsFailed(failures(rows, self.folder.path, self.config.hydra.launcher.tail_lines, rerun=False))
