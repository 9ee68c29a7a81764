"""The techniques of a ladder, and the overrides of `lightning-solo train` for each combination."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import catalogue
from lightning_solo.errors import ConflictError, PresetError, nearest

BASELINE = "baseline"
_CALLBACK = "+solo/callback="
_STRATEGY = "+solo/strategy="
_PRECISION = "solo.precision="


@dataclass(frozen=True)
class LadderTechnique:
    """A technique that a ladder tries."""

    name: str  # its name in the table
    overrides: tuple[str, ...]  # the overrides of `lightning-solo train` that add it to the preset `baseline`
    exact: bool = False  # whether a run with it should equal one without it, bit for bit
    card: str = ""  # the name of its card; empty for a precision, which has none

    def owns(self, override: str) -> bool:
        """Return whether an override sets an argument of this technique.

        >>> techniques()["checkpointing"].owns("solo.callback.activation_checkpointing.every_k=2")
        True
        """
        key = override.lstrip("+~").partition("=")[0]
        callbacks = [f"solo.callback.{text.removeprefix(_CALLBACK)}" for text in self.overrides if _CALLBACK in text]
        options = [*callbacks, *("solo.strategy" for text in self.overrides if _STRATEGY in text)]
        return any(key == option or key.startswith(f"{option}.") for option in options)


BF16 = LadderTechnique("bf16", ("solo.precision=bf16-mixed",))


@functools.cache
def techniques() -> dict[str, LadderTechnique]:
    """Return the techniques of a ladder by name, in the order in which combinations add them."""
    cards = [card for card in catalogue().cards.values() if card.rung is not None]
    rungs = {BF16.name: BF16}
    for card in sorted(cards, key=lambda card: (card.rung.order, card.name)):  # type: ignore[union-attr]
        assert card.rung is not None
        rungs[card.rung.name] = _of_card(card, card.rung.name, card.rung.overrides)
    return rungs


def chosen(names: str | None) -> tuple[LadderTechnique, ...]:
    """Return the techniques of a list such as ``bf16,checkpointing``, in the ladder's order; by default its rungs.

    Args:
        names: of rungs, or of any techniques, such as ``adapters``, joined by commas. Techniques without a rung come
            last, in the order of the list.

    Raises:
        PresetError: a name is unknown or empty.
    """
    ladder = techniques()
    if names is None:
        return tuple(ladder.values())
    by_name = {**ladder, **{technique.card: technique for technique in ladder.values() if technique.card}}
    for card in catalogue().cards.values():
        by_name.setdefault(card.name, _of_card(card, card.name))
    requested = dict.fromkeys(name.strip() for name in names.split(","))
    for name in requested:
        if name not in by_name:
            listed = [t.name if t.card in ("", t.name) else f"{t.name} ({t.card})" for t in ladder.values()]
            raise PresetError(
                f"--techniques {names}: no technique {name!r}{nearest(name, by_name)}there are {', '.join(listed)}, and"
                " every other technique by its name, such as adapters"
            )
    wanted = [by_name[name] for name in requested]
    return tuple(dict.fromkeys([*(each for each in ladder.values() if each in wanted), *wanted]))


def _of_card(card: Card, name: str, more: Sequence[str] = ()) -> LadderTechnique:
    return LadderTechnique(name, (f"+solo/{card.group}={card.name}", *more), card.exact, card.name)


def name_of(combination: Sequence[LadderTechnique]) -> str:
    """Return the name of a combination."""
    return " + ".join(technique.name for technique in combination) or BASELINE


def folder_name(combination: Sequence[LadderTechnique]) -> str:
    """Return the name of a combination's folder."""
    return name_of(combination).replace(" ", "")


def overrides_of(
    combination: Sequence[LadderTechnique], given: Sequence[str], ladder: Sequence[LadderTechnique] | None = None
) -> list[str]:
    """Return the overrides of `lightning-solo train` for a combination; the last technique's precision counts.

    Args:
        combination: techniques.
        given: the user's overrides; an argument of a technique is used only in combinations with that technique.
        ladder: the techniques of the ladder; by default all.

    >>> overrides_of([techniques()["checkpointing"]], ["seed=1", "solo.strategy.stage=3"])
    ['seed=1', 'solo=baseline', '+solo/callback=[activation_checkpointing]']

    Raises:
        ConflictError: two techniques choose a strategy, or set the same field.
    """
    others = [each for each in (techniques().values() if ladder is None else ladder) if each not in combination]

    def applies(text: str) -> bool:
        return any(each.owns(text) for each in combination) or not any(each.owns(text) for each in others)

    wanted = [text for text in given if applies(text)]
    needed = [text for technique in combination for text in technique.overrides]
    callbacks: list[str] = []
    for text in [*wanted, *needed]:
        if text.startswith(_CALLBACK):
            callbacks += [name.strip() for name in text.removeprefix(_CALLBACK).strip("[]").split(",")]
    listed = [f"{_CALLBACK}[{','.join(callbacks)}]"] if callbacks else []
    precisions = [text for text in needed if text.startswith(_PRECISION)]
    fields = [text for text in needed if not text.startswith((_CALLBACK, _PRECISION))]
    fields = [*precisions[-1:], *dict.fromkeys(fields)]
    _refuse_twice(fields, combination)
    first = [text for text in wanted if not text.startswith((_CALLBACK, "solo.", "+solo.", "~solo."))]
    last = [text for text in wanted if text.startswith(("solo.", "+solo.", "~solo."))]
    return [*first, f"solo={BASELINE}", *fields, *listed, *last]


def _refuse_twice(fields: Sequence[str], combination: Sequence[LadderTechnique]) -> None:
    keys = [text.partition("=")[0] for text in fields]
    for key in keys:
        if keys.count(key) > 1:
            both = " and ".join(t.name for t in combination if any(text.startswith(f"{key}=") for text in t.overrides))
            raise ConflictError(f"{both}: each sets {key.lstrip('+')}; only one of them can be in a run")
