"""Lightning's entry point for callbacks of every Trainer, found by a sweep's jobs alone: nothing is installed."""

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
    """Write what `importlib.metadata` reads of an installed package that has these entry points."""
    package = folder / "lightning_solo_job-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-solo-job\nVersion: 1\n")
    (package / "entry_points.txt").write_text(TEXT)


def find(folder: Path) -> None:
    """Let this process find them, as if the package were installed."""
    sys.path.append(str(folder))
