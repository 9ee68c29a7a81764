"""The order in which techniques act, which does not depend on the order in which they are listed."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The order in which techniques act. Techniques of one phase act in the order of the preset."""

    ITEMS = -1
    """Loads the items of the data set otherwise; later phases see those."""
    BATCHES = 0
    """Regroups items into batches; later phases see those."""
    DATA = 1
    """Changes the loader or its batches."""
    ADAPT = 2
    """Adds or freezes parameters, as adapters do."""
    REWRITE = 3
    """Replaces modules, or the precision in which weights are stored."""
    SAVED_TENSORS = 4
    """Changes the tensors that are kept for backward."""
    COMPILE = 5
    """Compiles the result of the earlier phases."""
    STATES = 6
    """Replaces optimizers, or moves their states."""
    STEP = 7
    """Changes when gradients are summed, used and freed."""
    OBSERVE = 8
    """Only observes."""
