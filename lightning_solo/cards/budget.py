"""The setting of techniques that keep something within a budget of memory: bytes, or a share."""

from __future__ import annotations

import re
from typing import Any

from lightning_solo.cards.settings import setting
from lightning_solo.units import MiB, parse_bytes

_NUMBER = re.compile(r"\d+|\d*\.\d+")


def parse_budget(budget: int | float | str) -> int | float:
    """Return bytes as an int, a share as a float.

    >>> parse_budget("6GiB"), parse_budget("6442450944"), parse_budget("0.5")
    (6442450944, 6442450944, 0.5)

    Raises:
        ValueError: it is neither.
    """
    try:
        if isinstance(budget, str) and not _NUMBER.fullmatch(budget):
            return parse_bytes(budget)
        number = float(budget)
        if 0 <= number <= 1:
            return number
        if number >= MiB:
            return int(budget)
    except (ValueError, OverflowError):
        pass
    raise ValueError("write bytes, at least 1 MiB, such as 6GiB or 6442450944, or a share from 0 to 1, such as 0.5")


def budget_setting(text: str) -> Any:
    """Return a field of settings: a budget as `parse_budget` reads it, or None."""
    return setting(None, text, check=_complaint)


def _complaint(budget: int | float | str | None) -> str | None:
    try:
        if budget is not None:
            parse_budget(budget)
    except ValueError as error:
        return str(error)
    return None
