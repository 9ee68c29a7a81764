"""Every card against the code and the files that belong to it; a new technique is tested without an edit here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.cards.arguments import parameters_of
from lightning_solo.cards.card import RESOURCES, Card, resources
from lightning_solo.cards.catalogue import built_in_cards, load_class, problems
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.presets.compose import compose_yaml

ROOT = Path(__file__).parents[2]
CARDS = list(built_in_cards().values())
every_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@every_card
def test_its_word_is_in_its_places(card: Card) -> None:
    folder = ROOT / "lightning_solo" / "techniques" / card.name
    assert card.target.startswith(f"lightning_solo.techniques.{card.name}.")
    assert (folder / "card.py").is_file()
    assert (ROOT / "tests" / "techniques" / f"test_{card.name}.py").is_file()


def test_every_folder_has_a_card() -> None:
    folders = {path.parent.name for path in (ROOT / "lightning_solo" / "techniques").glob("*/__init__.py")}
    assert folders == {card.name for card in CARDS}


@every_card
def test_it_is_whole(card: Card) -> None:
    assert list(problems(card)) == []
    for line in (card.saves, card.costs, card.numerics, card.conflicts, card.reference):
        assert line.strip()
    assert is_dataclass(card.settings)
    assert all(field.metadata.get("text") for field in fields(card.settings))
    assert card.check({}) == card.settings()
    own = {*resources(card.owns, card.settings()), *resources(card.reads, card.settings())}
    assert set(card.instead) <= set(RESOURCES) | own


@every_card
def test_the_class_takes_the_settings(card: Card) -> None:
    signature = inspect.signature(load_class(card).__init__)
    taken = {name: p.default for name, p in list(signature.parameters.items())[1:]}
    assert plain(taken) == plain({name: p.default for name, p in parameters_of(card.settings).items()})


@every_card
def test_hydra_composes_its_defaults(card: Card) -> None:
    choice = f"+strategy={card.name}" if card.group == "strategy" else f"+callback={card.name}"
    composed = compose_yaml({"precision": "32-true"}, [choice])
    node = composed["strategy"] if card.group == "strategy" else composed["callback"][card.name]
    named = {"name": card.name} if card.group == "strategy" else {}
    assert node == {**named, **plain(card.defaults)}


@every_card
def test_its_documentation_names_every_setting(card: Card) -> None:
    doc = load_class(card).__doc__
    assert all(re.search(rf"^        {name}: ", doc, re.MULTILINE) for name in card.defaults)


@every_card
def test_it_is_equal_only_to_itself_and_refuses_new_settings(card: Card) -> None:
    cls = load_class(card)
    technique, other = cls(), cls.from_settings(card.settings())
    assert technique != other
    assert len({technique, other}) == 2
    assert vars(technique).keys() == vars(other).keys()
    for name, value in card.defaults.items():
        assert getattr(getattr(other, "settings", other), name) == value
        if card.group != "strategy":  # of which Lightning sets attributes
            with pytest.raises(AttributeError):
                setattr(technique, name, value)


def wrong_values(card: Card) -> list[tuple[str, Any]]:
    """One value for each setting that it can't have: of another type, below the least, or not among those allowed."""
    wrong: list[tuple[str, Any]] = []
    for name, parameter in parameters_of(card.settings).items():
        wrong.append((name, {1, 2}))
        if parameter.at_least is not None:
            wrong.append((name, int(parameter.at_least) - 1))
        if parameter.allowed:
            wrong.append((name, "none of these" if isinstance(parameter.allowed[0], str) else 12345))
    return wrong


WRONG = [(card, name, value) for card in CARDS for name, value in wrong_values(card)]


@pytest.mark.parametrize(("card", "name", "value"), WRONG, ids=[f"{c.name}.{n}={v!r}" for c, n, v in WRONG])
def test_constructor_refuses_values_that_the_card_refuses(card: Card, name: str, value: Any) -> None:
    with pytest.raises((PresetError, ConflictError), match=name):
        card.check({name: value})
    with pytest.raises((PresetError, ConflictError), match=name):
        load_class(card)(**{name: value})


@every_card
def test_its_repr_builds_it_again(card: Card) -> None:
    if any(need.kind == "check" for need in card.requires):
        pytest.importorskip("deepspeed", reason="its constructor asks for the package")
    cls = load_class(card)
    made = cls()
    again = eval(repr(made), {cls.__name__: cls, card.class_name: cls})
    assert repr(again) == repr(made)
    names = [field.name for field in fields(card.settings)]
    assert repr(made).startswith(card.class_name)
    assert all(f"{name}=" in repr(made) for name in names)


@every_card
def test_every_requirement_has_a_remedy_for_its_settings(card: Card) -> None:
    for need in card.requires:
        words = need.words(card.settings())
        assert words
        assert "{" not in words
