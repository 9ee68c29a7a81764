"""The order in which techniques act, which does not depend on the order in which they are listed."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The order in which techniques act. Techniques of one phase act in the order of the preset."""

    ITEMS = -1
    """Loads the items of the data set otherwise; later phases see those."""
    BATCHES = 0
    """Regroups items into batches; later phases see those."""
    POSITION = 1
    """Saves the loader's position; what comes later copies such a loader."""
    DATA = 2
    """Changes the loader or its batches."""
    ADAPT = 3
    """Adds or freezes parameters, as adapters do."""
    FACTORIZE = 4
    """Replaces weights by fewer ones; later phases see those."""
    REWRITE = 5
    """Replaces modules, or the precision in which weights are stored."""
    SAVED_TENSORS = 6
    """Changes the tensors that are kept for backward."""
    COMPILE = 7
    """Compiles the result of the earlier phases."""
    OPTIMIZER = 8
    """Replaces the optimizer; later phases see its replacement."""
    STATES = 9
    """Stores optimizer states otherwise, or moves them."""
    STEP = 10
    """Changes when gradients are summed, used and freed."""
    OBSERVE = 11
    """Only observes."""
