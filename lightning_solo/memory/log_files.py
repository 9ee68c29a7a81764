"""Paths of an observer's files: relative to the run's directory, and inside of it."""

from __future__ import annotations

from pathlib import Path, PurePath

from lightning_solo.errors import PresetError

ALLOWED = "allowed is a relative path without '..', such as 'logs/memory'"


def not_below_a_folder(value: str) -> str | None:
    """Return what is allowed where a path can't be of something below a folder; None where it is."""
    path = PurePath(value)
    named = value.strip() and value.isprintable() and not value.endswith(("/", "\\")) and len(value) <= 255
    leads_out = path.is_absolute() or ".." in path.parts or value.startswith(("~", "\\"))
    return None if named and not leads_out else ALLOWED


def path_below(root: str, path: str, option: str) -> Path:
    """Return ``path`` below ``root``, with symbolic links resolved.

    Raises:
        PresetError: it leads outside; names ``option``.
    """
    base = Path(root).resolve()
    target = (base / path).resolve()
    if not target.is_relative_to(base):
        raise PresetError(f"{option}={path!r}: leads outside the log directory {base}, to {target}; {ALLOWED}")
    return target
