"""The classes of all callbacks, for short `_target_` paths; `lightning_solo` makes this module callable."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from lightning_solo.cards.catalogue import built_in_cards, load_class

    for card in built_in_cards().values():
        if card.class_name == name and card.group == "callback":
            return load_class(card)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from lightning_solo.cards.catalogue import built_in_cards

    return sorted([*globals(), *(card.class_name for card in built_in_cards().values() if card.group == "callback")])
