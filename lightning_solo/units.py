"""Bytes and durations as people read them; GiB = 2**30 everywhere."""

from __future__ import annotations

GiB = 2**30
MiB = 2**20
KiB = 2**10


def format_bytes(count: int) -> str:
    """Return ``count`` bytes in the largest binary unit that leaves a number of at least one.

    >>> format_bytes(3 * GiB // 2), format_bytes(512)
    ('1.50 GiB', '512 B')
    """
    for size, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
