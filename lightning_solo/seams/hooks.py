"""What hooks of modules and callbacks do, as far as their code tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

OTHERS = frozenset({"autograd", "no_grad", "enable_grad", "set_grad_enabled", "requires_grad", "requires_grad_"})
"""Names with "grad" in them that are not those of gradients."""

OWN = frozenset({"lightning", "pytorch_lightning", "lightning_solo"})
WEIGHTS = frozenset({"BackboneFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging"})
"""Lightning's callbacks whose hooks read or change weights."""


def uses_gradients(function: Any) -> bool:
    """Return whether a function's code has a name of gradients; many hooks are for other things.

    >>> uses_gradients(lambda p: p.grad.mul_(2)), uses_gradients(lambda loss: loss.backward())
    (True, False)
    """
    return bool(gradient_names(function))


def gradient_names(function: Any) -> set[str]:
    """Return the names of gradients, and of functions on them, in a function's code."""
    return {name for name in _names(getattr(function, "__code__", None)) if "grad" in name} - OTHERS


def code_of_others(owner: Any, hooks: Iterable[str]) -> list[str]:
    """Return those hooks of a callback or module that are neither Lightning's nor this package's own code.

    Lightning's callbacks that read or change weights count as such code.
    """
    found = []
    for hook in hooks:
        function = getattr(owner, hook, None)
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        kind = getattr(function, "__qualname__", "").partition(".")[0]
        if callable(function) and (package not in OWN or kind in WEIGHTS):
            found.append(f"{type(owner).__name__}.{hook}")
    return found


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _names(constant)
