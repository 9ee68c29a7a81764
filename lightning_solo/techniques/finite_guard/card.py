"""The card of `finite_guard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_solo.cards.card import Card, resources
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of FiniteGuard."""

    policy: str = setting(
        "stop",
        "after a loss or gradient that is infinite or NaN: stop the run, or skip the step and its batches",
        allowed=("stop", "skip_window"),
    )
    spike: str = setting(
        "warn",
        "after a loss above the mean of the last 128 steps by 6 standard deviations",
        allowed=("ignore", "warn", "stop", "skip_window"),
    )
    max_skips: int = setting(10, "skipped steps in a row after which the run stops", at_least=1)
    min_loss_scale: float = setting(1.0, "under 16-mixed: loss scale below which the run stops", at_least=0.0)

    @property
    def skips(self) -> bool:
        """Whether a step may be skipped."""
        return "skip_window" in (self.policy, self.spike)


def _engine(settings: Any, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        kept = chosen.card.group == "strategy" and "gradients" in resources(chosen.card.frees, chosen.settings)
        if kept and settings.skips:
            name = "policy" if settings.policy == "skip_window" else "spike"
            return (
                f"callback.finite_guard.{name}=skip_window and strategy={chosen.card.name}, whose engine keeps the"
                f" gradients of the step; write callback.finite_guard.{name}=stop"
            )
    return None


CARD = Card(
    name="finite_guard",
    target="lightning_solo.techniques.finite_guard.technique:FiniteGuard",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it keeps a loss or gradient that is infinite or NaN from the weights",
    costs="a look at each gradient, unless it is clipped by its norm or the optimizer looks at it itself; a wait for"
    " the device at each optimizer step; the batches of a step are kept until its end",
    numerics="bit-exact",
    conflicts="several processes; ``skip_window`` where gradients are used in backward or kept by an engine",
    reference="Chowdhery et al. 2022, PaLM, section 5.1, arXiv 2204.02311 (batches skipped after spikes)",
    exact=True,
    rules=(_engine,),
    planned="left out",
)
