"""Remedies in messages: where the package has them, what they say, and the configurations that follow from them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.pages import DOCS, load_file

MESSAGES = load_file(DOCS / "messages.py")
PACKAGE, GAP, text = MESSAGES.PACKAGE, MESSAGES.GAP, MESSAGES.text

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


def advice(message: str) -> str:
    """Return the part of a message that tells what to write."""
    return re.split(r"\b[Ww]rite\b|(?<=[:;]) drop\b", message, maxsplit=1)[-1]
