"""The setting for a memory budget: bytes, or a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_solo.cards.settings import setting
from lightning_solo.units import parse_budget


def bytes_or_share(budget: int | float | str) -> int | float:
    """Return bytes as an int, a share as a float.

    >>> bytes_or_share("6GiB"), bytes_or_share("6442450944"), bytes_or_share("0.5")
    (6442450944, 6442450944, 0.5)

    Raises:
        ValueError: neither bytes nor a share.
    """
    try:
        if not isinstance(budget, bool) and 0 <= float(budget) <= 1:
            return float(budget)
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        return parse_budget(budget)
    except ValueError as error:
        raise ValueError(f"{error}; or a share from 0 to 1, such as 0.5") from None


def budget_setting(text: str, parse: Callable[[Any], object] = bytes_or_share, default: str | None = None) -> Any:
    """Return a field of settings for a budget or None; ``parse`` raises ValueError for an invalid budget."""

    def complaint(budget: int | float | str | None) -> str | None:
        try:
            if budget is not None:
                parse(budget)
        except ValueError as error:
            return str(error).removeprefix(f"{budget!r}: ")
        return None

    return setting(default, text, check=complaint)
