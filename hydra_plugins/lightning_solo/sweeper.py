"""`hydra/sweeper=solo_optuna`: a search by Optuna in any Hydra application; importing this imports neither.

Hydra loads plugins before they are in `sys.modules`: a dataclass can't have its annotations as strings here.
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lightning_solo.errors import CapabilityError
from lightning_solo.sweeps.search_settings import Settings

OLDEST = 4


@dataclass
class SoloOptunaSweeperConf(Settings):
    """The section `hydra.sweeper`; `lightning_solo.sweeps.search_settings.settings` replaces None by defaults."""

    _target_: str = "hydra_plugins.lightning_solo.sweeper.SoloOptunaSweeper"
    n_jobs: int | None = None  # type: ignore[assignment]
    direction: Any = "minimize"
    objectives: list[str] | None = None  # type: ignore[assignment]
    params: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(
    group="hydra/sweeper", name="solo_optuna", node=SoloOptunaSweeperConf, provider="lightning-solo"
)


def refuse_without_optuna() -> None:
    """Refuse to search without Optuna, or with one that is too old.

    Raises:
        CapabilityError: names the command that installs it.
    """
    installed = importlib.metadata.version("optuna") if importlib.util.find_spec("optuna") else "none"
    if installed == "none" or int(installed.partition(".")[0]) < OLDEST:
        raise CapabilityError(
            f"hydra/sweeper=solo_optuna needs Optuna {OLDEST} or newer, here is {installed}:"
            " pip install 'lightning-solo[optuna]'"
        )


class SoloOptunaSweeper(Sweeper):
    """Passes all calls to `lightning_solo.sweeps.search`, which is imported when a search starts."""

    def __init__(self, params: Mapping[str, Any] | None, **settings: Any) -> None:
        self.params = params or {}
        self.settings = settings
        self._search: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the settings; the launcher chooses the sweep's folder."""
        from lightning_solo.sweeps.launch import without_trace

        with without_trace():
            refuse_without_optuna()
            from lightning_solo.sweeps.search import Search

            self._search = Search(hydra_context, task_function, config, self.settings)

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials."""
        from lightning_solo.sweeps.launch import without_trace

        with without_trace():
            self._search([*(f"{name}={value}" for name, value in self.params.items()), *arguments])
