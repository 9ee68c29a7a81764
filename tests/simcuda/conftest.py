"""The simulated device's own tests run only on it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simcuda import device

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_the_simulated_device() -> None:
    """Skip a test if ``cuda`` is not the simulated device."""
    if not device.is_installed():
        pytest.skip("needs the simulated CUDA device: `make simcuda`")


@pytest.fixture
def pytester_run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs tests by another pytest: ``pytester_run(source, *arguments, **variables)``."""

    def run(source: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_seeded.py").write_text(textwrap.dedent(source))
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-rs", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        environment.pop("PYTEST_ADDOPTS", None)
        return subprocess.run(
            [*command, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    return run
