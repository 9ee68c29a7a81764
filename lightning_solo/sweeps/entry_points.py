"""The entry point by which Lightning adds the observer to every Trainer, visible to a sweep's jobs alone."""

from __future__ import annotations

import sys
from pathlib import Path

OBSERVER = "lightning_solo.sweeps.observer"
TEXT = f"""\
[lightning.pytorch.callbacks_factory]
sweep = {OBSERVER}:callbacks_for_lightning
[pytorch_lightning.callbacks_factory]
sweep = {OBSERVER}:callbacks_for_pytorch_lightning
"""


def announce(folder: Path) -> None:
    """Write the metadata of a package with these entry points, as `importlib.metadata` reads it."""
    package = folder / "lightning_solo_job-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-solo-job\nVersion: 1\n")
    (package / "entry_points.txt").write_text(TEXT)


def find(folder: Path) -> None:
    """Make them visible to this process, as if the package were installed."""
    sys.path.append(str(folder))
