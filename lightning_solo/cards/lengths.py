"""The setting that selects how the lengths of a data set's items are read."""

from __future__ import annotations

from typing import Any

from lightning_solo.cards.settings import setting

WAYS = "``auto``, ``collated``, the name of a column, or in Python a function of an item"


def length_setting() -> Any:
    """Return a field of settings for the argument of `lightning_solo.data.item_lengths.item_lengths`."""
    text = f"write {WAYS.replace('`', '')}"
    return setting("auto", WAYS, check=lambda way: None if callable(way) or (isinstance(way, str) and way) else text)
