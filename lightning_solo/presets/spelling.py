"""Overrides in messages, as the command line spells them."""

from __future__ import annotations

import re

_BEFORE = r"""(?<![\w./('"~+])([~+]*)"""
_CHOICE = re.compile(rf"{_BEFORE}(callback|strategy)=(?!')")
_FIELD = re.compile(rf"{_BEFORE}((?:precision|accumulate_grad_batches|strategy|callback|auto)(?:=|\.(?=\w)))")


def on_command_line(message: str) -> str:
    """Return a message with the prefix ``solo.`` in its overrides, of which Python takes none.

    Quoted text, such as a user's, is left as it is.

    >>> on_command_line("callback.attention: write ~callback.attention, or +callback=throughput precision=bf16-true")
    'solo.callback.attention: write ~solo.callback.attention, or +solo/callback=throughput solo.precision=bf16-true'
    >>> on_command_line("'precision=16' and trainer.precision=16: write solo.precision=16, or Trainer(strategy='auto')")
    "'precision=16' and trainer.precision=16: write solo.precision=16, or Trainer(strategy='auto')"
    """
    return _FIELD.sub(r"\1solo.\2", _CHOICE.sub(r"\1solo/\2=", message))
