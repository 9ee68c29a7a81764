"""Constructor arguments of models, data and optimizers, read from source because importing them takes seconds."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_solo.cards.arguments import REQUIRED, Foreign, Parameter
from lightning_solo.cards.catalogue import module_file


class _Names(dict[str, Any]):
    """The names that an annotation may use; any other name is `Foreign`."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Foreign


_NAMES = _Names({name: getattr(typing, name) for name in ("Any", "Callable", "Literal", "Optional", "Union")})
_NAMES.update(Mapping=Mapping, Sequence=Sequence)
PSEUDO_FIELDS = ("ClassVar", "KW_ONLY")
"""Annotations in a dataclass that make no field."""


@functools.cache
def parameters(target: str) -> dict[str, Parameter]:
    """Return the constructor arguments of ``"module:Class"`` in order, without importing the module."""
    module, _, name = target.partition(":")
    file = module_file(module)
    assert file is not None, f"the registry names a missing module: {module}"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is None:
        return _fields(node, tree, module)
    arguments = init.args.args[1:] + init.args.kwonlyargs
    missing = [None] * (len(init.args.args) - 1 - len(init.args.defaults))
    defaults = [*missing, *init.args.defaults, *init.args.kw_defaults]
    return {
        arg.arg: _parameter(arg.annotation, default, tree) for arg, default in zip(arguments, defaults, strict=True)
    }


def _fields(node: ast.ClassDef, tree: ast.Module, module: str) -> dict[str, Parameter]:
    """Return the arguments of a class without constructor: those of its bases in this package, then its own fields."""
    modules = {n.name: module for n in tree.body if isinstance(n, ast.ClassDef)}
    modules |= {name.name: str(n.module) for n in tree.body if isinstance(n, ast.ImportFrom) for name in n.names}
    bases = [ast.unparse(base) for base in node.bases]
    found = {key: p for base in bases if base in modules for key, p in parameters(f"{modules[base]}:{base}").items()}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.annotation).partition("[")[0] not in PSEUDO_FIELDS:
            found[ast.unparse(each.target)] = _parameter(each.annotation, each.value, tree)
    return found


def _parameter(annotation: ast.expr | None, default: ast.expr | None, tree: ast.Module) -> Parameter:
    return Parameter(
        kind=_evaluate(annotation) if annotation else Any,
        default=REQUIRED if default is None else _literal(default, tree),
    )


def _literal(node: ast.expr, tree: ast.Module) -> Any:
    """Return the value of a default, which is a literal or the name of a constant in the same module."""
    if isinstance(node, ast.Name):
        node = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == node.id)
    return ast.literal_eval(node)


def _evaluate(annotation: ast.expr) -> Any:
    try:
        return eval(ast.unparse(annotation), {}, _NAMES)  # source of installed code, never a user's text
    except (TypeError, AttributeError):  # a part or a subscript of a type that only its own module knows
        return Any


def parameters_of_class(cls: Callable[..., Any]) -> dict[str, Parameter] | None:
    """Return the constructor arguments of a class, or None if it, or a decorator of it, takes ``**kwargs``."""
    signature = inspect.signature(cls)
    outermost = inspect.signature(cls, follow_wrapped=False)  # a decorator may take more than what it decorates
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for s in (signature, outermost) for p in s.parameters.values()):
        return None
    return {name: Parameter(Any, p.default) for name, p in signature.parameters.items()}
