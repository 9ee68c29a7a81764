"""The order in which techniques act on a run, whatever the order in which they are listed."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When a technique acts, compared with others. Within a phase the order of the list counts."""

    DATA = 0
    """Changes the loader or its batches."""
    ADAPT = 1
    """Adds or freezes parameters, as adapters do."""
    REWRITE = 2
    """Replaces modules, or the precision in which weights are stored."""
    SAVED_TENSORS = 3
    """Changes what is kept for backward."""
    COMPILE = 4
    """Compiles what the phases before have made."""
    STATES = 5
    """Replaces optimizers, or moves their states."""
    STEP = 6
    """Changes when gradients are summed, used and freed."""
    OBSERVE = 7
    """Only looks."""
