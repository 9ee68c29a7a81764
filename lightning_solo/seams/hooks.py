"""What hooks of modules and callbacks do, as far as their code tells."""

from __future__ import annotations

from types import CodeType
from typing import Any

OTHERS = frozenset({"autograd", "no_grad", "enable_grad", "set_grad_enabled", "requires_grad", "requires_grad_"})
"""Names with "grad" in them that are not those of gradients."""


def uses_gradients(function: Any) -> bool:
    """Return whether a function's code has a name of gradients; many hooks are for other things.

    >>> uses_gradients(lambda p: p.grad.mul_(2)), uses_gradients(lambda loss: loss.backward())
    (True, False)
    """
    return _names_gradients(getattr(function, "__code__", None))


def _names_gradients(code: CodeType | None) -> bool:
    if code is None:
        return False
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return any("grad" in name and name not in OTHERS for name in code.co_names) or any(map(_names_gradients, inner))
