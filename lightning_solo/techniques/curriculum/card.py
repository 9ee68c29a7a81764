"""The card of `curriculum`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting

SEQUENCES = "sequence_length"
"""The ``by`` that cuts sequences; all others choose items."""


def _no_difficulty(by: object) -> str | None:
    if callable(by) or (isinstance(by, str) and by):
        return None
    return "write sequence_length, length, collated, loss, the name of a column, or in Python a function of an item"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Curriculum."""

    by: str | Callable[[Any], float] = setting(  # noqa: RUF009 - the default is a string
        "length",
        "sequence_length, which cuts batches; or the difficulty of an item, larger numbers being more difficult: "
        "length (the data set's column, or an item's first sequence), collated (the length after the collate "
        "function), loss, the name of a column, key or attribute, or in Python a function of an item",
        check=_no_difficulty,
    )
    start: float = setting(
        0.1,
        "share of the items, or of the longest sequence, at the beginning",
        check=lambda start: None if 0 < start < 1 else "write a share between 0 and 1, such as 0.1",
    )
    duration: int = setting(1000, "steps or tokens until all of it is used", at_least=1)
    schedule: Literal["linear", "root"] = setting(
        "linear", "how the share grows; root: fast at first, the square of the share grows linearly"
    )
    pace: Literal["steps", "tokens"] = setting(
        "steps",
        "unit of the duration: optimizer steps, or tokens, which are those of the items without padding, or by "
        "sequence_length all places of the cut batches",
    )
    multiple: int = setting(8, "tokens cut off a sequence are a multiple of it", at_least=1)
    seed: int = setting(0, "of the draws of items", at_least=0)


def _steps_unknown(settings: Settings, configuration: Configuration) -> str | None:
    """Refuse ``pace: steps`` if the number of batches in a step isn't known when items are drawn."""
    if settings.by == SEQUENCES or settings.pace != "steps":
        return None
    for chosen in configuration.techniques:
        if "accumulation_factor" in chosen.owned():
            return (
                f"callback.curriculum.pace=steps and {chosen.choice}: items are drawn before the number of batches in a"
                " step is known; write callback.curriculum.pace=tokens, or callback.curriculum.by=sequence_length,"
                f" or {chosen.removal} and accumulate_grad_batches=<N>"
            )
    return None


def _under_engines(settings: Settings, configuration: Configuration) -> str:
    if settings.by == SEQUENCES:
        return "each process would cut by the longest of its own sequences; write callback.curriculum.by=length"
    return ROUNDING


CARD = Card(
    name="curriculum",
    target="lightning_solo.techniques.curriculum.technique:Curriculum",
    phase=Phase.BATCHES,
    settings=Settings,
    saves="by ``sequence_length``, arithmetic and activations of the first steps, in proportion to the length, and of"
    " attention to its square. By difficulty nothing; it may make training stable or shorter",
    costs="each item is read before the fit, and again whenever Lightning reloads the loader; by ``loss`` it also runs"
    " through the module alone, forward, and a checkpoint has 4 bytes per item. By ``sequence_length`` the tokens"
    " that are cut off are not trained on",
    numerics="differs from a plain run until the share is 1; then every item comes once per epoch, whole",
    conflicts="by difficulty: iterable data sets, a batch sampler or sampler of your own, a loader that keeps its"
    " position itself, several loaders, other techniques that make the batches; by steps also techniques that change"
    " the batches per step, and Lightning's GradientAccumulationScheduler; by ``loss``: manual optimization. By"
    " ``sequence_length``: batches without sequences, or padded on the left (all refused)",
    reference="Bengio et al. 2009, https://doi.org/10.1145/1553374.1553380; Platanios et al. 2019, arXiv 1903.09848"
    " (the schedules); Li et al. 2022, arXiv 2108.06084 (sequence length)",
    owns=lambda settings: frozenset({"sequences" if settings.by == SEQUENCES else "batches"}),
    instead={"batches": "callback.curriculum.by=sequence_length"},
    rules=(_steps_unknown,),
    planned="left out",
    engines=alike(_under_engines),
)
