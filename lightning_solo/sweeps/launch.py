"""From Hydra to a sweep and back: the sweep's folder, its composed jobs, and their results."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, setup_globals
from hydra.errors import CompactHydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_solo.errors import ConflictError, PresetError, SoloError
from lightning_solo.machine import nvidia_gpus
from lightning_solo.sweeps.application import Application, application_of
from lightning_solo.sweeps.display import Display, failures
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.gpus import VISIBLE, check_devices, devices_of, gpus_of, with_parallel
from lightning_solo.sweeps.job_process import VARIABLE
from lightning_solo.sweeps.jobs import AUTO, Job, Settings, check_folders, check_most, check_names, count_jobs
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.results import Row
from lightning_solo.sweeps.sweep import Sweep

TIME = "@time@"
INTERRUPTED = 130
MULTIRUN = "multirun.yaml"


class Launch:
    """Runs one Hydra multirun.

    Raises:
        CompactHydraException: a setting or a sweep is refused; Hydra prints it without a trace.
    """

    def __init__(
        self,
        hydra_context: HydraContext,
        task: Callable[..., Any],
        config: DictConfig,
        *,
        max_jobs: int,
        preload: Sequence[str],
        **settings: Any,
    ) -> None:
        with without_trace():
            self.hydra_context = hydra_context
            self.config = config
            check_names("launcher", settings, Settings)
            refuse_ranks()
            settings_ = Settings(**settings)
            self.gpus = gpus_of(settings_, os.environ.get(VISIBLE), [] if settings_.gpus is None else nvidia_gpus())
            self.settings = with_parallel(settings_, self.gpus)
            self.planned_bytes = planned_bytes_of(task, self.settings)
            self.application = application_of(task, preload, hydra_context)
            check_product(config, max_jobs, hydra_context.config_loader)
            self.folder = SweepFolder(Path(sweep_dir(config, self.application)))
        with read_write(config.hydra.sweep), open_dict(config.hydra.sweep):
            config.hydra.sweep.dir = str(self.folder.path)
        self._kept: tuple[Sweep, Display] | None = None

    @contextmanager
    def kept(self, jobs: Collection[int]) -> Iterator[tuple[Sweep, Display]]:
        """Keep the sweep and its display open between calls, for a sweeper that runs some jobs at a time."""
        with without_trace():
            display = Display(self.folder, dict.fromkeys(jobs, ""), self.settings.parallel or 1)
            told: dict[str, Any] = {"tell": display.tell, "look": display.look}
            sweep = Sweep(self.folder, self.application, self.settings, gpus=self.gpus, **told)
            try:
                with display.shown(), sweep.opened():
                    self._kept = sweep, display
                    yield self._kept
            except KeyboardInterrupt:
                done = sum(row.status == FINISHED for row in sweep.rows.values())
                resumes = f"the same command resumes: {self.folder.path}"
                display.console.out(f"interrupted with {done} of {len(jobs)} jobs done; {resumes}", highlight=False)
                raise SystemExit(INTERRUPTED) from None
            finally:
                self._kept = None

    def __call__(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run jobs and return Hydra's `JobReturn` of each; failed jobs share one error, which names all of them."""
        setup_globals()
        with self._nothing_left():
            configs = [self._composed(initial_job_idx + i, overrides) for i, overrides in enumerate(job_overrides)]
            jobs = [self._job(config) for config in configs]
            check_folders(self.folder.path, jobs)
            check_devices(jobs, self.gpus)
            if jobs:
                jobs[0].argument()
        names = {job.number: " ".join(job.overrides) for job in jobs}
        with self.kept(names) if self._kept is None else nullcontext(self._kept) as (sweep, display):
            display.names.update(names)
            rows = sweep.run(jobs)
        error = JobsFailed(failures(rows, self.folder.path, self.settings.tail_lines))
        return [job_return(config, row, error) for config, row in zip(configs, rows, strict=True)]

    @contextmanager
    def _nothing_left(self) -> Iterator[None]:
        """Remove the folder of a refused sweep if it holds only Hydra's own file."""
        try:
            with without_trace():
                yield
        except BaseException:
            if [file.name for file in self.folder.path.glob("*")] == [MULTIRUN]:
                (self.folder.path / MULTIRUN).unlink()
                self.folder.path.rmdir()
            raise

    def _composed(self, number: int, overrides: Sequence[str]) -> DictConfig:
        overrides = [*overrides, f"hydra.sweep.dir={quoted(str(self.folder.path))}"]
        config: DictConfig = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        return config

    def _job(self, config: DictConfig) -> Job:
        return Job(
            number=config.hydra.job.num,
            overrides=tuple(task_overrides(config)),
            folder=self.folder.path / of_sweep(config, "subdir"),
            config_hash=config_hash(config),
            argument=partial(self.application.dumps, config),
            devices=devices_of(config, bool(self.gpus)),
            planned_bytes=cache(partial(self.planned_bytes, config)),
        )


class JobsFailed(CompactHydraException):
    """Some jobs did not finish; the message is a table of them."""


class FailedJob(JobReturn):
    """The `JobReturn` of a job that did not finish. Unlike Hydra's own, it raises the error without printing it."""

    @property
    def return_value(self) -> Any:
        """Raise the error."""
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


@contextmanager
def without_trace() -> Iterator[None]:
    """Raise this package's errors as the type that Hydra prints without a traceback."""
    try:
        yield
    except SoloError as error:
        raise CompactHydraException(str(error)) from None


def refuse_ranks() -> None:
    """Refuse a sweep that a job's Trainer starts, because it starts the command again for each further device."""
    if VARIABLE in os.environ and "LOCAL_RANK" in os.environ:
        raise ConflictError(
            "a job's Trainer uses several devices, for which Lightning would start the whole sweep again; write their"
            " number as solo.devices or trainer.devices, or 1, or hydra.launcher.gpus=auto for one GPU per job"
        )


def planned_bytes_of(task: Callable[..., Any], settings: Settings) -> Callable[[DictConfig], int | None]:
    """Return the function ``planned_bytes`` of the application's module if jobs are packed by it.

    Raises:
        PresetError: the module has none.
    """
    if settings.jobs_per_gpu != AUTO:
        return lambda _: None
    planned: Any = getattr(sys.modules.get(task.__module__), "planned_bytes", None)
    if planned is None:
        raise PresetError(
            "hydra.launcher.jobs_per_gpu=auto: jobs are packed by their planned memory, and the application has no"
            " function planned_bytes(config), which returns the bytes of a job; write it, or a number of jobs"
        )
    return partial(planned)


def check_product(config: DictConfig, most: int, loader: ConfigLoader) -> None:
    """Count the jobs of Hydra's own sweeper and compose the first one, before any folder is created.

    Raises:
        PresetError: there are no jobs, or more than ``most``.
        HydraException: raised by Hydra, for example for an unknown key.
    """
    sweeper = config.hydra.sweeper
    if not str(sweeper.get("_target_", "")).endswith("BasicSweeper"):
        return  # another sweeper chooses its jobs itself
    texts = [*(f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()), *task_overrides(config)]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(texts)
    check_most(count_jobs(overrides), most)
    if overrides:
        loader.load_sweep_config(config, BasicSweeper.split_arguments(overrides, None)[0][0])


def sweep_dir(config: DictConfig, application: Application) -> str:
    """Return the sweep's folder; the time in its name is replaced by a hash of application and overrides.

    So the same command finds its earlier results.
    """
    config_ = copy.deepcopy(config)
    OmegaConf.clear_cache(config_)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OmegaConf 2.4 renames it to register_resolver, another function in 2.3
        OmegaConf.register_new_resolver("now", lambda _: TIME, replace=True, use_cache=False)
    try:
        folder = of_sweep(config_, "dir")
    finally:
        setup_globals()
    if TIME not in folder:
        return folder
    before, _, after = folder.partition(TIME)
    after = after.rpartition(TIME)[2]
    overrides = task_overrides(config)
    what = [application.file or application.module, application.function, config.hydra.job.config_name, overrides]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]
    return f"{before}{application.name}-{digest}{after}"


def task_overrides(config: DictConfig) -> list[str]:
    """Return the overrides that are not Hydra's own, as they were written: with their interpolations."""
    texts: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    return [str(text) for text in texts]


def of_sweep(config: DictConfig, key: str) -> str:
    """Return a value of `hydra.sweep`, with `${hydra:...}` resolved in this configuration."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        return str(config.hydra.sweep[key])
    finally:
        HydraConfig.instance().cfg = before


def config_hash(config: DictConfig) -> str:
    """Return a hash of the application's configuration, unresolved and without Hydra's own section."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    fields = {key: value for key, value in plain.items() if key != "hydra"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def quoted(text: str) -> str:
    """Return a text in quotes, as the value of an override."""
    return QuotedString(text, Quote.single).with_quotes()  # a backslash is literal except before a quote


def job_return(config: DictConfig, row: Row, error: Exception) -> JobReturn:
    """Return a job's `JobReturn`, as Hydra's own launcher does."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    finished = row.status == FINISHED
    return (JobReturn if finished else FailedJob)(
        overrides=list(filter_overrides(row.overrides)),
        cfg=plain,
        hydra_cfg=OmegaConf.masked_copy(config, ["hydra"]),
        working_dir=row.folder,
        task_name=config.hydra.job.name,
        status=JobStatus.COMPLETED if finished else JobStatus.FAILED,
        _return_value=row.returned if finished else error,
    )
