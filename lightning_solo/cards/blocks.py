"""The setting that selects the blocks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning_solo.cards.settings import setting

AUTO = "auto"
"""Selects the repeated blocks of a module, which are found by their structure."""


def blocks_setting(what: str = "the repeated blocks of any model", example: str = "GPT2Block") -> Any:
    """Return a field of settings that chooses the blocks: `AUTO`, or the class names of the modules that are blocks."""
    return setting(AUTO, f"auto: {what}; or class names, as [{example}]", check=partial(_complaint, example=example))


def _complaint(blocks: str | Sequence[str], example: str) -> str | None:
    names = [blocks] if isinstance(blocks, str) else blocks
    if not names or not all(name.strip() for name in names):
        return f"write 'auto' or class names, as [{example}]"
    return "write 'auto' alone, or class names only" if not isinstance(blocks, str) and AUTO in blocks else None
