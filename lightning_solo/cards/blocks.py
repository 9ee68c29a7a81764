"""The setting `blocks` of techniques that act on a model's repeated blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_solo.cards.arguments import setting

AUTO = "auto"
"""The repeated blocks of a module, found by how they are built."""


def blocks_setting() -> Any:
    """Return a field of settings: `AUTO`, or the class names of what is one block each."""
    return setting(AUTO, "auto: the repeated blocks of any model; or class names, as [GPT2Block]", check=_complaint)


def _complaint(blocks: str | Sequence[str]) -> str | None:
    names = [blocks] if isinstance(blocks, str) else blocks
    if not names or not all(name.strip() for name in names):
        return "write 'auto' or class names, as [GPT2Block]"
    return "write 'auto' alone, or class names only" if not isinstance(blocks, str) and AUTO in blocks else None
