"""All cards: those of this package, found by folder, and those of other packages, found by entry point."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import re
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from lightning_solo.cards.card import RESOURCES, Card, Requirement, Rung
from lightning_solo.cards.configuration import Chosen
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings
from lightning_solo.errors import ConflictError, PresetError

GROUP = "lightning_solo.techniques"
"""Entry point group for the cards of other packages: ``name = "package.module:CARD"``."""


@dataclass(frozen=True)
class Catalogue:
    """All known techniques."""

    cards: Mapping[str, Card]  # by name; ours come first
    folders: tuple[Path, ...]  # of other packages' presets; each has a folder ``solo``
    broken: MappingProxyType[str, str]  # entry point -> why its technique is left out

    def group(self, group: str) -> dict[str, Card]:
        """Return the cards of Hydra's group ``callback`` or ``strategy``, by name."""
        return {name: card for name, card in self.cards.items() if card.group == group}


class BuiltInCards(Mapping[str, Card]):
    """The cards of this package's techniques, by name; each is imported when it is first read."""

    def __init__(self) -> None:
        folder = Path(__file__).parents[1] / "techniques"
        self._names = sorted(path.parent.name for path in folder.glob("*/card.py"))

    def __getitem__(self, name: str) -> Card:
        if name not in self._names:
            raise KeyError(name)
        card: Card = importlib.import_module(f"lightning_solo.techniques.{name}.card").CARD
        return card

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@functools.cache
def built_in_cards() -> Mapping[str, Card]:
    """Return the cards of this package's techniques, by name."""
    return BuiltInCards()


@functools.cache
def catalogue() -> Catalogue:
    """Return all techniques; warn once of other packages' techniques that are broken, and leave them out."""
    others: dict[str, Card] = {}
    folders: list[Path] = []
    broken: dict[str, str] = {}
    cards = ChainMap(others, built_in_cards())  # type: ignore[arg-type] # only the first is ever changed
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            card = _loaded(point)
            if card.name in cards:
                raise PresetError(f"the name {card.name!r} is taken by {cards[card.name].target}")
            folder = _configuration(point)
        except Exception as error:  # whatever another package does, ours must still work
            broken[f"{point.name} = {point.value}"] = f"{type(error).__name__}: {error}"
            continue
        others[card.name] = card
        folders += [folder] if folder is not None and folder not in folders else []
    for point_text, reason in broken.items():
        warnings.warn(f"the technique of entry point {point_text!r} is left out: {reason}", stacklevel=2)
    return Catalogue(cards, tuple(folders), MappingProxyType(broken))


def chosen_of(technique: object) -> Chosen | None:
    """Return a technique's object as a `Chosen`, with its card and settings; None if no card names its class."""
    targets = {card.target: card for card in catalogue().cards.values()}
    for cls in type(technique).__mro__:
        card = targets.get(f"{cls.__module__}:{cls.__qualname__}")
        if card is not None:
            values = {field.name: getattr(technique, field.name, field.default) for field in fields(card.settings)}
            settings = getattr(technique, "settings", None) or card.check(values)
            return Chosen(card, settings, card.group if card.group == "strategy" else f"callback.{card.name}")
    return None


def load_class(card: Card) -> Any:
    """Import and return the class of a technique."""
    return resolve_name(card.target)


def _loaded(point: EntryPoint) -> Card:
    """Load and check the card of an entry point."""
    card = point.load()
    if not isinstance(card, Card):
        raise PresetError(f"{point.value} is a {type(card).__name__}; write a lightning_solo.cards.card.Card")
    for problem in problems(card):
        raise PresetError(problem)
    return card


def problems(card: Card) -> Iterator[str]:
    """Yield each mistake in a card with its remedy, without importing the technique."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", card.name):
        yield f"name={card.name!r}: write lower-case letters, digits and underscores"
    if not isinstance(card.phase, Phase):
        yield f"{card.name}: phase={card.phase!r} is none of Phase's: {', '.join(phase.name for phase in Phase)}"
    if card.group not in ("callback", "strategy"):
        yield f"{card.name}: group={card.group!r}: write 'callback' or 'strategy'"
    settings = card.settings
    if not (isinstance(settings, type) and issubclass(settings, TechniqueSettings) and is_dataclass(settings)):
        yield f"{card.name}: settings={settings!r}: write a frozen dataclass with the base TechniqueSettings"
    else:
        missing = [field.name for field in fields(settings) if field.default is MISSING]
        for name in missing:
            yield f"{card.name}: the setting {name!r} has no default; write {name} = setting(<default>)"
        if not missing:
            try:
                card.check({})
            except (PresetError, ConflictError, TypeError) as error:
                yield f"the defaults of {card.name} are refused: {error}"
    yield from _missing_target(card)
    for name in ("planned", "footprint"):
        way = getattr(card, name)
        if way not in ("attached", "left out", None) and ":" not in str(way):
            yield f"{card.name}: {name}={way!r}: write 'attached', 'left out' or 'module:function'"
    if not all(isinstance(need, Requirement) for need in card.requires):
        yield f"{card.name}: requires={card.requires!r}: write a tuple of Requirement"
    if not all(callable(rule) for rule in card.rules):
        yield f"{card.name}: rules={card.rules!r}: write a tuple of functions of (settings, configuration)"
    if card.caveat is not None and not callable(card.caveat):
        yield f"{card.name}: caveat={card.caveat!r}: write a function of the settings"
    if not isinstance(card.rung, Rung | None):
        yield f"{card.name}: rung={card.rung!r}: write Rung(name, order), or None"
    for kind in ("owns", "reads", "frees"):
        names = getattr(card, kind)
        for name in () if callable(names) else names:
            if name not in RESOURCES and (near := difflib.get_close_matches(name, RESOURCES, n=1, cutoff=0.85)):
                yield f"{card.name}: {kind} {name!r}; did you mean {near[0]!r}?"


def _missing_target(card: Card) -> Iterator[str]:
    module, _, name = card.target.partition(":")
    if not name:
        yield f"{card.name}: target={card.target!r}: write 'package.module:Class'"
        return
    path = module_file(module)
    if path is None:
        yield f"{card.name}: target={card.target!r}: there is no module {module}, or its package has no __init__.py"
    elif not re.search(rf"\b{re.escape(name)}\b", path.read_text(encoding="utf-8")):
        yield f"{card.name}: target={card.target!r}: {module} has no {name!r}"


def module_file(module: str) -> Path | None:
    """Return the file of a module, or None if it has none; don't import its parents."""
    root, *rest = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        below = path.parent.joinpath(*rest)
        path = below / "__init__.py" if below.is_dir() else below.with_suffix(".py")
    return path if path.is_file() else None


def _configuration(point: EntryPoint) -> Path | None:
    """Return the folder with the presets of a card's package, or None."""
    root = module_file(point.module.split(".")[0])
    folder = (root or Path()).parent / "conf"
    return folder if root is not None and (folder / "solo").is_dir() else None
