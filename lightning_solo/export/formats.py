"""The choices of `lightning-solo export` and `convert`, known without importing torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DTYPES = ("fp32", "bf16")
"""The types of exported weights."""
FORMS = ("plain", "compact")
"""The forms of a checkpoint's optimizer states, as `lightning-solo convert --to` takes them."""


@dataclass(frozen=True)
class Request:
    """One export.

    Attributes:
        source: a checkpoint, or the folder of a run.
        output: the file or folder to write; None for the format's default beside the checkpoint.
        dtype: one of `DTYPES`.
        overwrite: whether an existing output is replaced.
    """

    source: Path
    output: Path | None = None
    dtype: str = "fp32"
    overwrite: bool = False


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        summary: its content, in a few words.
        target: "module:function"; the function takes a `Request`, writes the output and returns a line about it.
    """

    summary: str
    target: str

    def load(self) -> Callable[[Request], str]:
        """Import and return the function."""
        module, name = self.target.split(":")
        function: Callable[[Request], str] = getattr(importlib.import_module(module), name)
        return function


FORMATS = {"weights": Format("one state dict in fp32 or bf16", "lightning_solo.export.weights:write_weights")}
"""Name of a format, as `--format` takes it, -> the format."""
