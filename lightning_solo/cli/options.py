"""Options of the commands: a parser that raises our errors, values that several commands take, and plain lines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import NoReturn

from rich.console import Console

from lightning_solo.errors import PresetError, nearest


class Parser(argparse.ArgumentParser):
    """Raises a PresetError that lists the options, instead of printing the usage."""

    def __init__(self, command: str, description: str, takes: str) -> None:
        super().__init__(prog=f"lightning-solo {command}", allow_abbrev=False, description=description)
        self.takes = takes
        self._negative_number_matcher = re.compile(r"-[\d.]")  # `--budget -4GiB` is a value, too, to be refused as such

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()
        is_option = message.startswith("unrecognized") and unknown[0].startswith("--")
        question = nearest(unknown[0], self._option_string_actions) if is_option else "; "
        raise PresetError(f"{message}{question}{self.takes}")


def positive(option: str, text: str, example: int) -> int:
    """Return the integer of an option.

    Raises:
        PresetError: not an integer of at least 1.
    """
    if not text.isdecimal() or not int(text):
        raise PresetError(f"{option} {text}: must be an integer of at least 1, such as {option} {example}")
    return int(text)


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Print lines without wrapping, highlights or markup."""
    for line in lines:
        console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)
