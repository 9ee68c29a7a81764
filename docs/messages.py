"""The messages of the package's errors, read from its source: for the index of the errors page, and for tests."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_solo import errors

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_solo"
GAP = "\0"
"""Stands for a value that is known only when the message is made."""
WORDS = 7


def text(node: ast.AST, path: Path) -> str:
    """Return a string's text, with the constants of its module in place, and a gap for each other value."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.Name(id=name) if isinstance(value := constants(path).get(name), str):
            return value
        case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other]):
            return text(one, path) or text(other, path)
        case ast.JoinedStr(values=values):
            return "".join(text(value, path) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)):
            value = constants(path).get(name)
            return value if isinstance(value, str) else GAP
    return GAP if isinstance(node, ast.FormattedValue) else ""


def constants(path: Path) -> dict[str, Any]:
    """Return the names of a module of the package."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    return vars(importlib.import_module(name))


def raised() -> Iterator[tuple[Path, str, str]]:
    """Yield (file, exception, text) of each message of this package's exceptions.

    A message is the argument of an exception, or a text that a function returns whose result is such an argument. Texts
    that cards and configurations return are conflicts.
    """
    names = [name for name, thing in vars(errors).items() if isinstance(thing, type)]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    makers = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[ast.Call(func=ast.Name(id=maker)), *_]) if name in names:
                    makers[maker] = name
                case ast.NamedExpr(ast.Name("message"), ast.Call(ast.Name(maker) | ast.Attribute(attr=maker))):
                    makers[maker] = "PresetError"
                case ast.Call(func=ast.Name(id=name), args=[message, *_]) if name in names:
                    yield path, name, text(message, path)
    for path, tree in trees.items():
        conflicts = path.name in ("card.py", "configuration.py", "engines.py")
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and (conflicts or function.name in makers):
                for node in ast.walk(function):
                    if isinstance(node, ast.Return | ast.Yield | ast.Assign) and node.value is not None:
                        yield path, makers.get(function.name, "ConflictError"), text(node.value, path)


def index() -> list[tuple[str, str, str]]:
    """Return (first words, exception, technique or "") of each message that begins with words of its own, sorted."""
    rows = set()
    for path, name, said in raised():
        room, *rest = path.relative_to(PACKAGE).parts
        words = said.replace(GAP, "…").split()
        first = " ".join(words[:WORDS]) + (" …" if len(words) > WORDS else "")
        if len(re.findall(r"[a-z]{2,}", first)) >= 3:
            rows.add((first, name, rest[0] if room == "techniques" else ""))
    return sorted(rows, key=lambda row: re.sub(r"[^a-z ]", "", row[0].lower()).strip())
