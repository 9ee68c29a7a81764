"""`hydra/launcher=solo`: a fresh process per job in any Hydra application; importing this imports no torch.

Hydra loads plugins before they are in `sys.modules`: a dataclass can't have its annotations as strings here.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lightning_solo.sweeps.jobs import Settings


@dataclass
class SoloLauncherConf(Settings):
    """The section `hydra.launcher`."""

    _target_: str = "hydra_plugins.lightning_solo.launcher.SoloLauncher"
    max_jobs: int = 1000
    preload: list[str] = field(default_factory=list)


ConfigStore.instance().store(group="hydra/launcher", name="solo", node=SoloLauncherConf, provider="lightning-solo")


class SoloLauncher(Launcher):
    """Passes all calls to `lightning_solo.sweeps.launch`, which is imported when a sweep starts."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self._launch: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Run the checks that need no composed job, and choose the sweep's folder."""
        from lightning_solo.sweeps.launch import Launch

        self._launch = Launch(hydra_context, task_function, config, **self.settings)

    @property
    def parallel(self) -> int:
        """The number of jobs at a time."""
        jobs: int = self._launch.settings.parallel
        return jobs

    def kept(self, jobs: Collection[int]) -> Any:
        """Keep the sweep open between calls of `launch`, for a sweeper that runs some of its jobs at a time."""
        return self._launch.kept(jobs)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs."""
        returns: Sequence[JobReturn] = self._launch(job_overrides, initial_job_idx)
        return returns
