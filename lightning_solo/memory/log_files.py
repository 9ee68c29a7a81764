"""Paths of an observer's files: relative to the run's directory, and inside of it."""

from __future__ import annotations

from pathlib import Path, PurePath

from lightning_solo.errors import PresetError

ALLOWED = "allowed is a relative path without '..', such as {example!r}"


def checked_path(value: object, option: str, example: str) -> str:
    """Return ``value`` if it names something below a directory.

    Raises:
        PresetError: it doesn't; names ``option`` and what is allowed, such as ``example``.
    """
    refused = PresetError(f"{option}={value!r}: {ALLOWED.format(example=example)}")
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or value.endswith(("/", "\\")):
        raise refused
    path = PurePath(value)
    if path.is_absolute() or ".." in path.parts or value.startswith(("~", "\\")) or len(value) > 255:
        raise refused
    return value


def path_below(root: str, path: str, option: str, example: str) -> Path:
    """Return ``path`` below ``root``, with symbolic links resolved.

    Raises:
        PresetError: it leads outside.
    """
    base = Path(root).resolve()
    target = (base / path).resolve()
    if not target.is_relative_to(base):
        raise PresetError(
            f"{option}={path!r}: leads outside the log directory {base}, to {target}; {ALLOWED.format(example=example)}"
        )
    return target
