"""Constructor arguments, read without importing the class, and the check of a value against its annotation.

Importing a callback imports torch and Lightning, which takes seconds; a misspelt argument should be found in
milliseconds. So the constructors of this library are read from their source by `ast`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_solo.errors import PresetError, nearest

REQUIRED: Any = inspect.Parameter.empty


class Foreign:
    """Stands for a type that only its own module knows, such as a Tensor: no plain value of a configuration is one."""


class _Names(dict[str, Any]):
    """The names an annotation may use; every other one is `Foreign`."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Foreign


_NAMES = _Names({name: getattr(typing, name) for name in ("Any", "Callable", "Literal", "Optional", "Union")})
_NAMES.update(Mapping=Mapping, Sequence=Sequence)


@dataclass(frozen=True)
class Parameter:
    """One keyword argument of a constructor: its annotation as a type, and its default or `REQUIRED`."""

    kind: Any
    default: Any = REQUIRED


@functools.cache
def parameters(target: str) -> dict[str, Parameter]:
    """Return the constructor arguments of ``"module:Class"`` in order, without importing the module."""
    module, _, name = target.partition(":")
    tree = ast.parse(_source(module).read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    init = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    found = init.args.args[1:] + init.args.kwonlyargs
    missing = [None] * (len(init.args.args) - 1 - len(init.args.defaults))
    defaults = [*missing, *init.args.defaults, *init.args.kw_defaults]
    return {
        arg.arg: Parameter(
            kind=_evaluate(arg.annotation) if arg.annotation else Any,
            default=REQUIRED if default is None else _literal(default, tree),
        )
        for arg, default in zip(found, defaults, strict=True)
    }


def _literal(node: ast.expr, tree: ast.Module) -> Any:
    """Return the value of a default: a literal, or the name of a constant of the same module."""
    if isinstance(node, ast.Name):
        found = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == node.id]
        node = found[0]
    return ast.literal_eval(node)


def _source(module: str) -> Path:
    """Return the file of a module; to find a sub-module's spec would import its parents, so only the root is asked."""
    root, *rest = module.split(".")
    spec = importlib.util.find_spec(root)
    assert spec is not None, f"the registry names a package that is not there: {root}"
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _evaluate(annotation: ast.expr) -> Any:
    try:
        return eval(ast.unparse(annotation), {}, _NAMES)  # source of installed code, never a user's text
    except (TypeError, AttributeError):  # a part or a subscript of a type that only its own module knows
        return Any


def parameters_of_class(cls: Callable[..., Any]) -> dict[str, Parameter] | None:
    """Return the constructor arguments of an imported class, or None where it takes any (``**kwargs``)."""
    signature = inspect.signature(cls)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return {name: Parameter(Any, p.default) for name, p in signature.parameters.items()}


def check_arguments(given: Mapping[str, Any], accepted: Mapping[str, Parameter], option: str) -> None:
    """Check names, then types, of ``given`` against a constructor's arguments.

    Raises:
        PresetError: an unknown or missing argument, or a value of another type; names ``option.argument``.
    """
    for name, value in given.items():
        if name not in accepted:
            raise PresetError(
                f"{option}.{name}={value!r}: no such argument{nearest(name, accepted)}there are {', '.join(accepted)}"
            )
        if not accepts(accepted[name].kind, value):
            raise PresetError(f"{option}.{name}={value!r}: expected {describe(accepted[name].kind)}")
    missing = [name for name, parameter in accepted.items() if parameter.default is REQUIRED and name not in given]
    if missing:
        raise PresetError(f"{option}: missing {', '.join(missing)}; write {option}.{missing[0]}=...")


def accepts(kind: Any, value: Any) -> bool:
    """Tell whether a plain value (str, int, float, bool, None, list, mapping) fits an annotation.

    >>> accepts(int, True), accepts(float, 1), accepts(Sequence[int], [1, "2"]), accepts(int | None, None)
    (False, True, False, True)
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
        return isinstance(value, (list, tuple)) and _all(arguments[0] if arguments else Any, value)
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
    ('an integer or null', "'epoch' or 'step'", 'a list of an integer')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments if argument is not Foreign)
    if origin is Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if origin is Sequence:
        return f"a list of {describe(arguments[0])}"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))
