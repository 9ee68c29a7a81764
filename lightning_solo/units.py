"""Bytes and numbers as people read them; GiB = 2**30 everywhere."""

from __future__ import annotations

import re

GiB = 2**30
MiB = 2**20
KiB = 2**10
_LONG = re.compile(r"(?<![\w.])\d+\.\d{4,}(?:e[+-]?\d+)?(?![\w.])")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i)?B", re.IGNORECASE)


def format_bytes(count: int) -> str:
    """Return ``count`` bytes in the largest binary unit that leaves a number of at least one.

    >>> format_bytes(3 * GiB // 2), format_bytes(512)
    ('1.50 GiB', '512 B')
    """
    for size, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Return a short time, such as a step's, with three digits.

    >>> format_seconds(0.00123), format_seconds(0.123), format_seconds(12.3)
    ('1.23 ms', '123 ms', '12.3 s')
    """
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def format_duration(seconds: float) -> str:
    """Return a long time, such as a job's, in whole units.

    >>> format_duration(4.2), format_duration(75), format_duration(7260)
    ('4 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def shorter_numbers(text: str) -> str:
    """Return a text in which numbers with many decimals, as a search draws them, are cut to 4 digits.

    >>> shorter_numbers("lr=0.0008311303692128172 decay=4.0438780095151014e-05 betas=[0.9,0.999] width=12345")
    'lr=0.0008311 decay=4.044e-05 betas=[0.9,0.999] width=12345'
    """
    return _LONG.sub(lambda found: f"{float(found[0]):.4g}", text)


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as ``16GiB`` stands for.

    >>> parse_bytes("16GiB") == 16 * GiB, parse_bytes("1.5 MiB") == 3 * MiB // 2, parse_bytes("512B")
    (True, True, 512)

    Raises:
        ValueError: it is no number of B, KiB, MiB, GiB or TiB, or of nothing; GB is 10**9 to some and 2**30 to others.
    """
    found = _BYTES.fullmatch(text.strip())
    count = int(float(found[1]) * 1024 ** " kmgt".index((found[2] or " ")[0].lower())) if found else 0
    if not count:
        raise ValueError(f"{text!r}: write a number above 0 and one of B, KiB, MiB, GiB, TiB, such as 16GiB")
    return count
