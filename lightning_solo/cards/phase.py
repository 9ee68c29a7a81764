"""The order in which techniques act, which does not depend on the order in which they are listed."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When a technique acts, compared with others. Within a phase the order of the list counts."""

    BATCHES = 0
    """Puts documents or items together to other batches; those behind count them."""
    DATA = 1
    """Changes the loader or its batches."""
    ADAPT = 2
    """Adds or freezes parameters, as adapters do."""
    REWRITE = 3
    """Replaces modules, or the precision in which weights are stored."""
    SAVED_TENSORS = 4
    """Changes what is kept for backward."""
    COMPILE = 5
    """Compiles what the phases before have made."""
    STATES = 6
    """Replaces optimizers, or moves their states."""
    STEP = 7
    """Changes when gradients are summed, used and freed."""
    OBSERVE = 8
    """Only looks."""
