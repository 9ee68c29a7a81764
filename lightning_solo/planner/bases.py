"""The entry of the solved plan among presets to plan; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_solo.cards.configuration import Configuration

SOLVED = "solved"
"""Name of the solved plan among presets."""


@dataclass(frozen=True)
class Bases:
    """Stands for the solved plan among the presets to plan.

    Attributes:
        bases: presets to which modes of blocks may be added, by name.
        host_memory: bytes of the host; None if it isn't judged.
        accept_tight: whether a plan may leave less than 5 % of the memory.
    """

    bases: Mapping[str, Configuration]
    host_memory: int | None = None
    accept_tight: bool = False

    @property
    def precision(self) -> str | None:
        """The precision of all bases."""
        return next((config.precision for config in self.bases.values()), None)

    def needs_cuda(self) -> None:
        """Return None: the solved plan uses what the device has."""


def is_base(config: Configuration) -> bool:
    """Return whether modes of blocks can be added to a preset."""
    owned = {resource for chosen in config.techniques for resource in chosen.owned()}
    moves = any(
        chosen.card.solved in ("moving", "weight_budget") or getattr(chosen.settings, "state_budget", None) is not None
        for chosen in config.techniques
    )
    return config.strategy is None and "saved_tensors" not in owned and not moves
