"""The setting that selects the blocks of a model."""

from __future__ import annotations

from typing import Any

from lightning_solo.cards.settings import names_or, setting

AUTO = "auto"
"""Selects the repeated blocks of a module, which are found by their structure."""


KEEP, KEEP_PRODUCTS, RECOMPUTE, HOST_INPUT, OFFLOAD = MODES = ("keep", "products", "recompute", "host_input", "offload")
"""Modes of a block: it keeps all activations, or its products; recomputes; recomputes, with its input on the host; or
moves all activations to the host."""


def blocks_setting(what: str = "the repeated blocks of any model", example: str = "GPT2Block") -> Any:
    """Return a field of settings that chooses the blocks: `AUTO`, or the class names of the modules that are blocks."""
    check = names_or(AUTO, "class names", f"[{example}]")
    return setting(AUTO, f"auto: {what}; or class names, as [{example}]", check=check)
