"""Hydra's own suites for launchers, which are in its wheel, with `hydra/launcher=solo`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.test_utils import launcher_common_tests as suites

pytestmark = [
    pytest.mark.long,
    # of the suites themselves, which write version_base=None and leave it out
    pytest.mark.filterwarnings("ignore::UserWarning:hydra"),
]


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scripts of the suites import this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.mark.parametrize(("launcher_name", "overrides"), [("solo", [])])
class TestLauncher(suites.LauncherTestSuite):
    """One process per job, from a closure inside of an instance."""


@pytest.mark.parametrize(("launcher_name", "overrides"), [("solo", ["hydra.sweeper.max_batch_size=2"])])
class TestBatches(suites.BatchedSweeperTestSuite):
    """Several launches of one sweep."""


@pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/launcher=solo"])])
class TestIntegration(suites.IntegrationTestSuite):
    """Scripts as users run them."""
