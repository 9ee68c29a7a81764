"""Replace and restore the forward of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch import nn

_REPLACEMENTS = "_replaced_forwards"
ATTRIBUTES = frozenset({"forward", _REPLACEMENTS})
"""Instance attributes of a module whose forward is replaced."""
Record = TypeVar("Record")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put all parts of a module into evaluation mode within a context; afterwards each has its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@dataclass
class _Replacement:
    record: Any
    function: Callable[..., Any]
    before: Callable[..., Any] | None  # the instance attribute `forward` that was there, if any


def replace_forward(module: nn.Module, function: Callable[..., Any], record: object) -> None:
    """Make a module call ``function(module, *args, **kwargs)`` as its forward, until `restore_forwards`.

    Type, parameters, state-dict keys and hooks of the module stay the same. A deep copy has the same function and a
    copy of the record. An unpickled module has the forward of its class.

    Args:
        module: whose forward is replaced. It may be replaced already, with a record of another type.
        function: a function of a Python module, called ``forward``: pickle stores a bound method by its name, and so
            finds the method of the class.
        record: settings and state of the replacement, for `record_of`.
    """
    replacements = vars(module).setdefault(_REPLACEMENTS, {})
    replacements[type(record)] = _Replacement(record, function, vars(module).get("forward"))
    module.forward = MethodType(function, module)


def record_of(module: nn.Module, kind: type[Record]) -> Record | None:
    """Return the record of a type that `replace_forward` stored; None if there is none."""
    replacement = vars(module).get(_REPLACEMENTS, {}).get(kind)
    return None if replacement is None else replacement.record


def original_forward(module: nn.Module, kind: type) -> Callable[..., Any]:
    """Return the forward from before the replacement whose record has this type."""
    replacement = vars(module).get(_REPLACEMENTS, {}).get(kind)
    # partial, not MethodType, of which torch.compile would make a graph break
    return (replacement and replacement.before) or partial(type(module).forward, module)


def restore_forwards(modules: Iterable[nn.Module], kind: type) -> None:
    """Undo `replace_forward` for records of a type; modules without one are left alone.

    A forward that was set after the replacement is kept.
    """
    for module in modules:
        replacements = vars(module).get(_REPLACEMENTS, {})
        replacement = replacements.pop(kind, None)
        if replacement is None:
            continue
        if not replacements:
            delattr(module, _REPLACEMENTS)
        if getattr(vars(module).get("forward"), "__func__", None) is replacement.function:
            del module.forward
            if replacement.before is not None:
                module.forward = replacement.before
