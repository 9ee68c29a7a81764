"""Options of the commands: a parser that refuses in our words, and values that several commands take."""

from __future__ import annotations

import argparse
from typing import NoReturn

from lightning_solo.errors import PresetError
from lightning_solo.units import parse_budget


class Parser(argparse.ArgumentParser):
    """Raises a PresetError with what the command takes, instead of printing the usage."""

    def __init__(self, command: str, description: str, takes: str) -> None:
        super().__init__(prog=f"lightning-solo {command}", allow_abbrev=False, description=description)
        self.takes = takes

    def error(self, message: str) -> NoReturn:
        raise PresetError(f"{message}; {self.takes}")


def positive(option: str, text: str, example: int) -> int:
    """Return the integer of an option.

    Raises:
        PresetError: it is not an integer of at least 1.
    """
    if not text.isdecimal() or not int(text):
        raise PresetError(f"{option} {text}: must be an integer of at least 1, such as {option} {example}")
    return int(text)


def size(option: str, text: str | None) -> int | None:
    """Return the bytes of an option, None where it is not given.

    Raises:
        PresetError: it is no size.
    """
    try:
        return None if text is None else parse_budget(text)
    except ValueError as error:
        raise PresetError(f"{option} {error}") from None
