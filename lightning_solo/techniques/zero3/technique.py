"""Partition weights, gradients and optimizer states over several devices by DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.optim import Optimizer

from lightning_solo.cards.card import resources
from lightning_solo.seams.zero_strategy import ZeroStrategy
from lightning_solo.techniques.zero3.card import CARD, Settings
from lightning_solo.zero.checkpoint import Group
from lightning_solo.zero.flat import require_flat
from lightning_solo.zero.host_optimizer import HostOptimizer


class ZeroStageStrategy(ZeroStrategy, Settings):
    """Train on several devices with DeepSpeed's ZeRO, stage 3 or 2.

    Attributes:
        settings: the arguments.

    Raises:
        CapabilityError: DeepSpeed is missing or too old.
        ConflictError: the engine doesn't support an argument of the Trainer, or the optimizer.
    """

    name = "zero3"

    def _init_state(self) -> None:
        self.settings = Settings.from_settings(self)
        self.start(timeout=timedelta(seconds=self.timeout_s))

    def __repr__(self) -> str:
        return repr(self.settings).replace("Settings", "ZeroStageStrategy", 1)

    def new_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration."""
        return self.settings.engine_config()

    def setup_environment(self) -> None:
        """Open the process group, after checks of the Trainer.

        Raises:
            ConflictError: the engine doesn't support an argument or a callback of the Trainer.
        """
        self.prepare(resources(CARD.owns, self.settings))

    def stepping_optimizer(self, optimizer: Optimizer, schedulers: list[Any], groups: Sequence[Group]) -> HostOptimizer:
        """Return the user's optimizer, which steps flat parts.

        Raises:
            ConflictError: the optimizer needs the shapes of its parameters.
        """
        require_flat(optimizer)
        return HostOptimizer(optimizer, optimizer, {})
