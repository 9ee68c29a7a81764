"""Names, types and defaults of arguments, and the check of plain values against them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from lightning_solo.errors import PresetError, nearest

REQUIRED: Any = inspect.Parameter.empty

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value and what to write, or None for a valid value."""


class Foreign:
    """Placeholder for a type that can't be resolved without an import, such as Tensor; no plain value matches it."""


@dataclass(frozen=True)
class Parameter:
    """One keyword argument."""

    kind: Any  # its annotation
    default: Any = REQUIRED  # its default, or `REQUIRED`
    allowed: tuple[Any, ...] = ()  # the allowed values; empty if every value of the type is allowed
    at_least: float | None = None  # the smallest allowed number
    check: Check | None = None  # an additional check of the value

    def complaint(self, value: Any) -> str | None:
        """Return what is wrong with a value and what to write instead, or None."""
        if not accepts(self.kind, value):
            return f"expected {self._expected()}"
        if self.allowed and value not in self.allowed:
            return f"write {self._expected()}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"expected {describe(self.kind)} that is finite"
        if self.at_least is not None and isinstance(value, int | float) and value < self.at_least:
            return f"expected {describe(self.kind)} of at least {self.at_least}"
        complaint = self.check(value) if self.check is not None else None
        if not isinstance(complaint, str | None):
            raise TypeError(f"its check returns {complaint!r}; return what is wrong with the value, or None")
        return complaint

    def _expected(self) -> str:
        if self.allowed:
            *others, last = map(repr, self.allowed)
            return f"{', '.join(others)} or {last}" if others else last
        return describe(self.kind) + (f" of at least {self.at_least}" if self.at_least is not None else "")


@functools.cache
def parameters_of(settings: type[Any]) -> dict[str, Parameter]:
    """Return the arguments of a dataclass of settings, in order."""
    kinds = typing.get_type_hints(settings)
    names = ("allowed", "at_least", "check")
    return {
        field.name: Parameter(
            kinds[field.name],
            REQUIRED if field.default is MISSING else field.default,
            **{name: field.metadata[name] for name in names if name in field.metadata},
        )
        for field in dataclasses.fields(settings)
    }


def check_arguments(values: Mapping[str, Any], accepted: Mapping[str, Parameter], option: str) -> None:
    """Check the names and values of arguments."""
    for name, value in values.items():
        if name not in accepted:
            raise PresetError(
                f"{option}.{name}={value!r}: no such argument{nearest(name, accepted)}there are {', '.join(accepted)}"
            )
        if complaint := accepted[name].complaint(value):
            raise PresetError(f"{option}.{name}={value!r}: {complaint}")
    missing = [name for name, parameter in accepted.items() if parameter.default is REQUIRED and name not in values]
    if missing:
        key = f"{option}.{missing[0]}"
        override = f"'+{key}=${{optimizer}}'" if key == "model.optimizer" else f"{key}=..."
        raise PresetError(f"{option}: missing {', '.join(missing)}; write {override}")


def accepts(kind: Any, value: Any) -> bool:
    """Return whether a plain value (str, int, float, bool, None, list, mapping) fits an annotation.

    >>> accepts(int, True), accepts(float, 1), accepts(Sequence[int], [1, "2"]), accepts(int | None, None)
    (False, True, False, True)
    >>> accepts(Sequence[int], range(2)), accepts(Sequence[str], "ab")
    (True, False)
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, Foreign) or origin is Callable or kind is Callable:
        return True
    if origin in (typing.Union, types.UnionType):
        known = [argument for argument in arguments if argument is not Foreign]
        return set(known) <= {type(None)} or any(accepts(argument, value) for argument in known)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin in (Sequence, list, tuple) or kind is Sequence:
        sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return sequence and _all(arguments[0] if arguments else Any, value)
    if origin is Mapping or kind is Mapping:
        return isinstance(value, Mapping) and _all(arguments[1] if arguments else Any, value.values())
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return type(value) in (int, float)
    if kind is int:
        return type(value) is int
    return isinstance(value, kind) if isinstance(kind, type) and origin is None else True


def _all(kind: Any, values: Iterable[Any]) -> bool:
    return all(accepts(kind, value) for value in values)


def describe(kind: Any) -> str:
    """Return an annotation in words.

    >>> describe(int | None), describe(Literal["epoch", "step"]), describe(Sequence[int])
    ('an integer or null', "'epoch' or 'step'", 'a list of integers')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments if argument is not Foreign)
    if origin is Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if origin is Sequence:
        return "a list of " + re.sub(r"\ban? (\w+)", r"\1s", describe(arguments[0]))  # an integer -> integers
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))
