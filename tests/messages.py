"""What tests look for in a message: class, options, values and what to write, never the sentence around them."""

from __future__ import annotations

import re


def mentions(*words: str) -> str:
    """Return a pattern for `match=`, of a text that has each of these words, in any order."""
    return r"(?s)\A" + "".join(f"(?=.*{re.escape(word)})" for word in words)


def lines_with(text: str, *words: str) -> list[str]:
    """Return the lines of a text that have each of these words, in any order."""
    return [line for line in text.splitlines() if all(word in line for word in words)]


def nearest(name: str) -> str:
    """Return how an error offers the name that comes nearest to a typing error."""
    return f"did you mean {name!r}"
