"""The setting of techniques that keep something within a budget of memory: bytes, or a share."""

from __future__ import annotations

from typing import Any

from lightning_solo.cards.arguments import setting
from lightning_solo.units import MiB, parse_bytes


def parse_budget(budget: int | float | str) -> int | float:
    """Return bytes as an int, a share as a float.

    >>> parse_budget("6GiB"), parse_budget(2**21), parse_budget(1)
    (6442450944, 2097152, 1.0)

    Raises:
        ValueError: it is neither.
    """
    if isinstance(budget, str):
        return parse_bytes(budget)
    if 0 <= budget <= 1:
        return float(budget)
    if budget < MiB:
        raise ValueError("write bytes, of at least 1 MiB, such as 6GiB, or a share from 0 to 1")
    return int(budget)


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
