"""Settings are checked once, belong to their object alone, and document the technique's class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Literal

import pytest

from lightning_solo.cards import settings as module
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.errors import ConflictError, PresetError


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Settings of Painter."""

    layers: int = setting(2, "coats of paint", at_least=1)
    colour: str = setting("red", "of the paint", allowed=("red", "blue"))
    finish: Literal["matt", "gloss"] = setting("matt", "of the last coat")
    widths: Sequence[Any] | Mapping[str, Any] = setting((), "of the brushes, in mm")

    def _check_together(self) -> None:
        if self.colour == "blue" and self.finish == "gloss":
            raise ConflictError("painter: colour=blue, finish=gloss")


class Base:
    """Stands for Lightning's Callback."""


class Painter(Base, Settings):
    """Paints.

    Raises:
        PresetError: a value that is not allowed.
    """

    def _init_state(self) -> None:
        self._left = self.layers


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": 0}, PresetError, "layers=0: expected an integer of at least 1"),
    ({"colour": "green"}, PresetError, "colour='green': write 'red' or 'blue'"),
    ({"colour": "blue", "finish": "gloss"}, ConflictError, "painter"),
]


@pytest.mark.parametrize(("values", "error", "message"), WRONG)
def test_wrong_values_are_refused_by_every_way_to_give_them(
    values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Settings(**values)
    with pytest.raises(error, match=message):
        Painter(**values)
    with pytest.raises(error, match=message):
        Settings.parse(values, "callback.painter")


def test_messages_name_the_option_path() -> None:
    with pytest.raises(PresetError, match=r"callback\.painter\.layers=0"):
        Settings.parse({"layers": 0}, "callback.painter")
    with pytest.raises(PresetError, match=r"callback\.painter\.colours='red'"):
        Settings.parse({"colours": "red"}, "callback.painter")


def test_settings_are_checked_once_between_values_and_technique(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    check = module.check_arguments
    monkeypatch.setattr(module, "check_arguments", lambda *args: (checks.append(args[2]), check(*args)))
    painter = Painter.from_settings(Settings.parse({"layers": 3}, "callback.painter"))
    assert checks == ["callback.painter"]
    assert (painter.layers, painter.colour, painter._left) == (3, "red", 3)
    Painter()
    assert len(checks) == 2


def test_containers_of_the_caller_are_neither_kept_nor_changed() -> None:
    widths: list[Any] = [[1], {"thin": [2]}]
    painter = Painter(widths=widths)
    parsed = Painter.from_settings(Settings.parse({"widths": widths}, "painter"))
    widths[0].append(7)
    widths[1]["thin"].append(7)
    assert painter.widths == parsed.widths == [[1], {"thin": [2]}]


def test_a_technique_equals_itself_alone_and_its_settings_cannot_be_set() -> None:
    painter = Painter()
    assert painter != Painter()
    assert len({painter, Painter()}) == 2
    assert Settings() == Settings.parse({}, "painter")
    with pytest.raises(FrozenInstanceError):
        painter.layers = 3  # type: ignore[misc]
    painter._left = 0  # running state can


def test_copies_and_pickles_have_settings_and_state() -> None:
    painter = Painter(layers=4)
    painter._left = 1
    for again in (copy.deepcopy(painter), pickle.loads(pickle.dumps(painter))):
        assert (again.layers, again._left) == (4, 1)
        assert repr(again) == repr(painter) == "Painter(layers=4, colour='red', finish='matt', widths=())"


def test_the_docstring_has_the_texts_before_what_is_raised() -> None:
    assert Painter.__doc__ is not None
    arguments = Painter.__doc__.index(
        "    Args:\n        layers: coats of paint.\n        colour: of the paint; one of red"
    )
    assert "one of matt, gloss" in Painter.__doc__
    assert arguments < Painter.__doc__.index("    Raises:")


def test_the_constructor_is_typed_with_evaluated_types() -> None:
    assert Painter.__init__.__annotations__["layers"] is int


def test_a_class_without_a_docstring_documents_its_settings() -> None:
    class Brush(Base, Settings):
        pass

    assert Brush.__doc__ is not None
    assert Brush.__doc__.startswith("Settings of Painter.\n\n    Args:\n        layers: coats of paint.")
    assert "PresetError:" in Brush.__doc__


def test_an_unknown_argument_is_refused_in_the_name_of_the_technique() -> None:
    class Roller(Base, Settings):
        pass

    with pytest.raises(TypeError, match=r"^Roller\.__init__\(\) .* 'coats'"):
        Roller(coats=3)  # type: ignore[call-arg]


def test_a_check_returns_words_or_none() -> None:
    @dataclass(frozen=True)
    class Rate(TechniqueSettings):
        rate: float = setting(0.5, "of a step", check=lambda rate: rate > 0)  # type: ignore[arg-type,return-value]

    with pytest.raises(TypeError, match="its check returns True"):
        Rate()
