"""The card of `finite_guard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_solo.cards.card import Card, resources
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import EXACT, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of FiniteGuard."""

    policy: str = setting(
        "stop",
        "after a loss or gradient that is infinite or NaN: stop the run, skip the step with its batches, or go back to"
        " the last checkpoint of this run and on with the next batches",
        allowed=("stop", "skip_window", "rewind"),
    )
    spike: str = setting(
        "warn",
        "after a loss above the mean of the last 128 steps by 6 standard deviations",
        allowed=("ignore", "warn", "stop", "skip_window", "rewind"),
    )
    max_skips: int = setting(
        10, "skipped steps in a row, or returns to one checkpoint, after which the run stops", at_least=1
    )
    min_loss_scale: float = setting(1.0, "under 16-mixed: loss scale below which the run stops", at_least=0.0)

    def option_of(self, *policies: str) -> str | None:
        """Return the setting with one of these policies, as messages name it, or None."""
        for name in ("policy", "spike"):
            if getattr(self, name) in policies:
                return f"callback.finite_guard.{name}"
        return None


def _engine(settings: Any, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        kept = chosen.card.group == "strategy" and "gradients" in resources(chosen.card.frees, chosen.settings)
        if kept and (option := settings.option_of("skip_window", "rewind")):
            value = getattr(settings, option.rpartition(".")[2])
            return (
                f"{option}={value} and strategy={chosen.card.name}, whose engine keeps the gradients of the step;"
                f" write {option}=stop"
            )
    return None


def _under_engines(settings: Settings, configuration: Configuration) -> str:
    if option := settings.option_of("rewind"):
        return f"processes don't go back to a checkpoint together; write {option}=stop"
    return EXACT


CARD = Card(
    name="finite_guard",
    target="lightning_solo.techniques.finite_guard.technique:FiniteGuard",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it keeps a loss or gradient that is infinite or NaN from the weights",
    costs="a look at each gradient, unless it is clipped by its norm or the optimizer looks at it itself; a wait for"
    " the device at each optimizer step; batches of at most 8 MiB are kept until the end of their step",
    numerics="bit-exact",
    conflicts="``rewind`` with several processes; ``skip_window`` where gradients are used in backward; that and"
    " ``rewind`` where an engine keeps them",
    reference="Chowdhery et al. 2022, PaLM, section 5.1, arXiv 2204.02311 (batches skipped after spikes)",
    exact=True,
    rules=(_engine,),
    planned="left out",
    engines=alike(_under_engines),
)
