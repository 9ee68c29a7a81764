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
    STORE = 5
    """Stores weights otherwise, in fewer bits or on the host; later phases compute with those."""
    REWRITE = 6
    """Replaces modules, or the way in which they compute."""
    SAVED_TENSORS = 7
    """Changes the tensors that are kept for backward."""
    COMPILE = 8
    """Compiles the result of the earlier phases."""
    OPTIMIZER = 9
    """Replaces the optimizer; later phases see its replacement."""
    STATES = 10
    """Stores optimizer states otherwise, or moves them."""
    STEP = 11
    """Changes when gradients are summed, used and freed."""
    OBSERVE = 12
    """Only observes."""
