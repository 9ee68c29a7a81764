"""Paths of an observer's files, relative to the run's directory and inside it."""

from __future__ import annotations

import warnings
from pathlib import Path, PurePath
from typing import Any

from lightning_solo.errors import PresetError

ALLOWED = "allowed is a relative path without '..', such as 'logs/memory'"


def not_below_a_folder(value: str) -> str | None:
    """Return None for a relative path without ``..``, else a text that states the allowed paths."""
    path = PurePath(value)
    named = value.strip() and value.isprintable() and not value.endswith(("/", "\\")) and len(value) <= 255
    leads_out = path.is_absolute() or ".." in path.parts or value.startswith(("~", "\\"))
    return None if named and not leads_out else ALLOWED


def path_below_logs(trainer: Any, path: str, option: str, instead: str) -> Path | None:
    """Return ``path`` below a Trainer's log directory, with symbolic links resolved.

    Return None in a process that isn't the run's first, and for a remote directory, with a warning that contains
    ``instead``, which names a replacement of the file.

    Raises:
        PresetError: the path is outside the directory; the message names ``option``.
    """
    root = str(trainer.log_dir or trainer.default_root_dir)
    if "://" in root:
        warnings.warn(f"{option}: {root} is remote, so {path} is not written; {instead}", stacklevel=3)
        return None
    base = Path(root).resolve()
    target = (base / path).resolve()
    if not target.is_relative_to(base):
        raise PresetError(f"{option}={path!r}: leads outside the log directory {base}, to {target}; {ALLOWED}")
    return target if trainer.is_global_zero else None
