"""Remedies in messages: where the package has them, what they say, and the configurations that follow from them."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "lightning_solo"
GAP = "\0"
"""Stands in a template for a value that is known only when the message is made."""
OVERRIDE = re.compile(
    r"(?<![\w./'\"{+~-])(?<!\w\()(?P<marks>[~+]*)(?P<prefix>solo[./])?"
    r"(?P<key>(?:callback|strategy)(?:\.\w+)+|callback|strategy|precision|accumulate_grad_batches|auto\.\w+)(?!\.<)\b"
    r"(?:=(?P<value><[^>]*>|\{[^}]*\}|\[\[.*?\]\]|\[[^\]]*\]|[^\s,;:)]+))?"
)
"""An override in a message, as Python or the command line writes it."""


def templates() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of each string of the package that tells what to write; of several parts as one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {node: text(node, path) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)}
        inner = {child for node in texts for child in ast.walk(node) if child is not node}
        docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in texts.keys() - inner - docs:
            if re.search(r"\b[Ww]rite\b(?!s)", texts[node]):
                yield path.relative_to(PACKAGE).as_posix(), texts[node]


def text(node: ast.AST, path: Path) -> str:
    """Return a string's text, with the constants of its module in place, and a gap for each other value."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text(value, path) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)):
            value = constants(path).get(name)
            return value if isinstance(value, str) else GAP
    return GAP if isinstance(node, ast.FormattedValue) else ""


def constants(path: Path) -> dict[str, Any]:
    """Return the names of a module."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    return vars(importlib.import_module(name))


def advice(message: str) -> str:
    """Return the part of a message that tells what to write."""
    return re.split(r"\b[Ww]rite\b|(?<=[:;]) drop\b", message, maxsplit=1)[-1]
