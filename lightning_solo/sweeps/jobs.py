"""The settings of a sweep, its jobs and their folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override, RangeSweep

from lightning_solo.cards.arguments import Parameter, check_arguments
from lightning_solo.errors import PresetError
from lightning_solo.sweeps.files import STATE

AUTO = "auto"
RERUN = ("never", "failed", "all")
MOST_JOBS = 10_000  # for a launcher without a setting for it, such as Hydra's own
REMEDY = "write 'hydra.sweep.subdir=${hydra.job.num}'"


@dataclass
class Settings:
    """The settings of `hydra.launcher`."""

    parallel: int | None = None  # jobs at a time; None for one per GPU and job on it, or 1 without ``gpus``
    # GPUs that are shared out between the jobs: ``auto``, a list of entries of CUDA_VISIBLE_DEVICES, or None
    gpus: Any = None
    jobs_per_gpu: Any = 1  # jobs that share a GPU; ``auto`` for as many as fit by their plans
    timeout_s: float | None = None  # seconds that a job may take; None for no limit
    grace_s: float = 10.0  # seconds between the signal that asks a job to end and the signal that kills it
    retries: int = 0  # how often a failed job is started again
    # which jobs of an earlier command run again: never, failed, all. Jobs with a changed configuration always run
    # again; so do those of a changed script, except with ``failed``.
    rerun: str = "never"
    output_mib: int = 64  # MiB of a job's output that are kept; 0 for all
    tail_lines: int = 15  # lines of a failed job's output that are shown

    def __post_init__(self) -> None:
        check_least("launcher", self, parallel=1, retries=0, grace_s=0, output_mib=0, tail_lines=0)
        if self.jobs_per_gpu != AUTO and (type(self.jobs_per_gpu) is not int or self.jobs_per_gpu < 1):
            raise PresetError(f"hydra.launcher.jobs_per_gpu={self.jobs_per_gpu}: must be 1 or more, or auto")
        if self.gpus is None and self.jobs_per_gpu != 1:
            raise PresetError(
                f"hydra.launcher.jobs_per_gpu={self.jobs_per_gpu}: there are no GPUs to share out; write"
                f" hydra.launcher.gpus=auto, or hydra.launcher.parallel={self.jobs_per_gpu} for one device"
            )
        if self.gpus is not None and self.gpus != AUTO and not (is_list(self.gpus) and self.gpus):
            raise PresetError(
                f"hydra.launcher.gpus={self.gpus}: must be auto for all, null, or a list such as [0] or [GPU-8932f937]"
            )
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise PresetError(f"hydra.launcher.timeout_s={self.timeout_s}: must be positive, or null for no limit")
        if self.rerun not in RERUN:
            raise PresetError(f"hydra.launcher.rerun={self.rerun!r}: must be one of {', '.join(RERUN)}")


def check_names(section: str, options: Mapping[str, Any], settings: type[Any]) -> None:
    """Refuse options of one of Hydra's sections that its settings don't have."""
    accepted = {name: Parameter(Any, None) for name in settings.__dataclass_fields__}
    check_arguments(options, accepted, f"hydra.{section}")


def check_least(section: str, settings: object, **least: int) -> None:
    """Refuse settings of one of Hydra's sections that are below their minimum."""
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and value < lowest:
            raise PresetError(f"hydra.{section}.{name}={value}: must be {lowest} or more")


def is_list(value: object) -> bool:
    """Return whether a value is a list, of Python or of a configuration."""
    return isinstance(value, Sequence) and not isinstance(value, str)


@dataclass(frozen=True)
class Job:
    """A job to run."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config_hash: str
    argument: Callable[[], bytes]  # returns the task function's pickled argument when it is needed
    devices: int = 1  # number of devices that it takes
    # returns the device memory that it is planned to take; None if unknown
    planned_bytes: Callable[[], int | None] = lambda: None


class Try(NamedTuple):
    """An attempt at a job."""

    job: Job
    attempt: int
    failures: int = 0  # earlier attempts that count against `Settings.retries`
    anew: str = ""  # the reason why it starts from the beginning; empty if it resumes the earlier attempts
    seconds: float = 0.0  # total seconds of the attempts that it resumes
    alone: bool = False  # whether no other job may use its GPUs, because it ran out of memory beside another
    gpus: tuple[str, ...] = ()  # the GPUs that it runs on
    shared: bool = False  # whether another job has used one of them while it ran

    @property
    def resumes(self) -> bool:
        """Whether it continues in the folder of an earlier attempt."""
        return self.attempt > 1 and not self.anew


def count_jobs(overrides: Sequence[Override]) -> dict[str, int]:
    """Return the number of values of each override of a sweep, without creating them.

    A value that only a sweeper resolves, such as a glob, counts as one.

    Raises:
        PresetError: there are none.
    """
    counts = {}
    for override in overrides:
        name = str(override.get_key_element())
        counts[name] = _values(override)
        if not counts[name]:
            raise PresetError(f"{override.input_line}: an empty range, 0 jobs; write for example {name}=range(1,5)")
    return counts


def _values(override: Override) -> int:
    value: Any = override.value() if override.is_discrete_sweep() else None
    if isinstance(value, RangeSweep):
        numbers: Any = value
        if not numbers.step:
            raise PresetError(f"{override.input_line}: a step of 0; write for example range(1,5,1)")
        jobs: int = math.ceil((numbers.stop - numbers.start) / float(numbers.step))
        return max(jobs, 0)
    return len(value.list) if hasattr(value, "list") else 1  # a glob has none


def check_most(counts: Mapping[str, int], most: int | None) -> None:
    """Refuse a sweep of more than ``most`` jobs; None for a launcher without `max_jobs`."""
    jobs = math.prod(counts.values())
    if jobs > (MOST_JOBS if most is None else most):
        limit, remedy = f"the most of this launcher is {MOST_JOBS:,}", ""
        if most is not None:
            limit, remedy = f"hydra.launcher.max_jobs={most:,}", f", or write hydra.launcher.max_jobs={jobs}"
        product = " x ".join(str(n) for n in counts.values() if n > 1)
        raise PresetError(f"this sweep has {jobs:,} jobs ({product}), and {limit}; sweep over fewer values{remedy}")


def check_folders(sweep: Path, jobs: Sequence[Job]) -> None:
    """Refuse jobs' folders outside the sweep's folder or inside one another."""
    folders = sorted((job.folder.resolve(), job.number, job) for job in jobs)  # a folder comes before those inside it
    for folder, number, job in folders:
        if sweep.resolve() not in folder.parents or folder.is_relative_to(sweep.resolve() / STATE):
            raise PresetError(
                f"hydra.sweep.subdir: job {number} would write to {job.folder}, which is not below {sweep}, or is"
                f" the sweep's own; {REMEDY}"
            )
    for (outer, other, _), (folder, number, job) in pairwise(folders):
        if folder.is_relative_to(outer):
            raise PresetError(
                f"hydra.sweep.subdir: job {number} would write to {job.folder}, in the folder of job {other}; {REMEDY}"
            )
