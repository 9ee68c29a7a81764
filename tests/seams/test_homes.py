"""A strategy of ours has a class for each home of Lightning; copies and pickles keep it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_solo.seams.homes import OfEitherHome, for_home, home_of
from tests.modules import regression


class Labelled(OfEitherHome):
    """A strategy of a user's own, with an argument."""

    base = "SingleDeviceStrategy"

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.label = label


def copies(strategy: Any) -> tuple[Any, Any]:
    return copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))


def test_copies_and_pickles_have_the_class_of_their_home(home: ModuleType) -> None:
    strategy = for_home(Labelled, home.__name__)("one")
    assert isinstance(strategy, home.strategies.SingleDeviceStrategy)
    for other in copies(strategy):
        assert type(other) is type(strategy) is for_home(Labelled, home.__name__)
        assert vars(other).keys() == vars(strategy).keys()
        assert other.label == "one"


def test_class_derived_from_that_of_a_home_is_kept(home: ModuleType) -> None:
    class OfHome(for_home(Labelled, home.__name__)):  # type: ignore[misc]
        """Derived from the strategy of a home."""

    strategy = OfHome("two")
    assert type(copy.deepcopy(strategy)) is OfHome


def test_strategy_without_a_home_is_of_lightning() -> None:
    assert isinstance(Labelled(), for_home(Labelled, "lightning.pytorch"))  # both homes are imported here


def test_home_of_trainers_modules_and_strategies(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    assert home_of(make_trainer(home)) == home_of(regression(home)) == home.__name__
    assert home_of(for_home(Labelled, home.__name__)()) == home.__name__
    assert home_of(object()) == "lightning.pytorch"
