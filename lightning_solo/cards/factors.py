"""What the cards of techniques that factorize weights have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import PresetError


def _wrong_rank(rank: int | float | None) -> str | None:
    fits = rank is None or (rank >= 1 if isinstance(rank, int) else 0 < rank < 1)
    return None if fits else "write a whole number of at least 1, or a share of the energy above 0 and below 1"


@dataclass(frozen=True)
class FactorSettings(TechniqueSettings):
    """Arguments of techniques that factorize weights."""

    rank: int | float | None = setting(
        None, "rank of the factors, as 64; or the share of the weight's energy that they keep, as 0.95",
        check=_wrong_rank,
    )  # fmt: skip
    start: str = setting(
        "svd", "svd: factors whose product is nearest to the weight; random: from scratch", allowed=("svd", "random")
    )
    after_fit: str = setting(
        "keep",
        "keep: the module keeps its factors; merge: it gets their products as weights",
        allowed=("keep", "merge"),
    )

    def _check_together(self) -> None:
        if self.start == "random" and isinstance(self.rank, float):
            raise PresetError(
                f"{self.technique}.start=random and {self.technique}.rank={self.rank}: random factors keep no energy of"
                f" a weight; write {self.technique}.rank=<whole number>, or {self.technique}.start=svd"
            )


def planned(settings: Any, tracing: Tracing) -> Tracing:
    """Plan with dense layers where ranks depend on the numbers in the weights."""
    if not isinstance(settings.rank, float):
        return tracing
    assumption = (
        f"{settings.technique}.rank={settings.rank} isn't planned, since ranks depend on the weights: a run takes less"
    )
    return tracing.assuming(assumption, attached=None)


def rule_of(option: str) -> Callable[[Any, Configuration], str | None]:
    """Return the rule that refuses techniques which choose the trained parameters before they are replaced."""

    def rule(settings: Any, configuration: Configuration) -> str | None:
        for chosen in configuration.techniques:
            if "trained_parameters" in chosen.owned():
                return (
                    f"{option} and {chosen.choice}, which chooses the parameters to train before they are replaced;"
                    f" write {chosen.removal}, or ~{option}"
                )
        return None

    return rule
