"""Overrides in messages: their values, and their names as the command line spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_START = r"""(?<![\w./('"~+])"""
_BEFORE = rf"{_START}([~+]*)"
_CHOICE = re.compile(rf"{_BEFORE}(callback|strategy)=(?!')")
_NO_STRATEGY = re.compile(rf"{_START}~strategy(?![\w.=])")  # Hydra deletes no field of a preset
_FIELD = re.compile(
    rf"{_BEFORE}((?:precision|accumulate_grad_batches|devices|strategy|callback|auto)(?:=|\.(?=[\w<])))"
)
_NAMES = re.compile(r"(?<=such as )\[('[\w./-]+'(?:, '[\w./-]+')*)\]")
_OPTION = r"(?:precision|accumulate_grad_batches|devices|strategy|callback|auto)[\w.]*=(?!')"
_OVERRIDE = re.compile(rf"{_START}([~+]+(?:callback|strategy)|{_OPTION})")


def on_command_line(message: str) -> str:
    """Return a message with the prefix ``solo.`` in its overrides, of which Python takes none, and `solo=` in names.

    Quoted text, such as a user's, is left as it is.

    >>> on_command_line("callback.attention: write ~callback.attention, or +callback=throughput precision=bf16-true")
    'solo.callback.attention: write ~solo.callback.attention, or +solo/callback=throughput solo.precision=bf16-true'
    >>> on_command_line("write ~strategy, or devices=1")
    'write solo.strategy=null, or solo.devices=1'
    >>> on_command_line("add the preset ddp, such as ['ddp', 'bf16']")
    "add the preset ddp, such as 'solo=[ddp,bf16]'"
    >>> on_command_line("'precision=16' and trainer.precision=16: write solo.precision=16, or Trainer(strategy='auto')")
    "'precision=16' and trainer.precision=16: write solo.precision=16, or Trainer(strategy='auto')"
    """
    message = _NAMES.sub(lambda names: f"'solo=[{_unquoted(names[1])}]'", message)
    message = _NO_STRATEGY.sub("solo.strategy=null", message)
    return _FIELD.sub(r"\1solo.\2", _CHOICE.sub(r"\1solo/\2=", message))


def on_lightning_cli(message: str) -> str:
    """Return a message with the options of `SoloCLI` in place of overrides.

    >>> on_lightning_cli("callback.attention: write ~callback.attention, or precision=bf16-true")
    'callback.attention: write --solo_overrides+=~callback.attention, or --solo_overrides+=precision=bf16-true'
    >>> on_lightning_cli("the preset sets precision='bf16-true'; write overrides=['precision=32-true']")
    "the preset sets precision='bf16-true'; write --solo_overrides=['precision=32-true']"
    """
    message = _NAMES.sub(lambda names: f"--solo=[{_unquoted(names[1])}]", message)
    return _OVERRIDE.sub(r"--solo_overrides+=\1", re.sub(r"(?<![\w.(])overrides=\[", "--solo_overrides=[", message))


def _unquoted(names: str) -> str:
    return names.replace("'", "").replace(", ", ",")


def written(value: object) -> str:
    """Return a plain value as an override's text.

    >>> written([1, None]), written(True), written({"x": 1}), written("16-mixed")
    ('[1,null]', 'true', '{x:1}', '16-mixed')
    """
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
