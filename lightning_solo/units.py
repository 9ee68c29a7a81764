"""Bytes, times and numbers as text; GiB = 2**30 everywhere."""

from __future__ import annotations

import math
import re
from fractions import Fraction

GiB = 2**30
MiB = 2**20
KiB = 2**10
_LONG = re.compile(r"(?<![\w.])\d+\.\d{4,}(?:e[+-]?\d+)?(?![\w.])")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i)?B", re.IGNORECASE)


def format_bytes(count: int) -> str:
    """Return bytes in the largest binary unit in which they are at least 1.

    >>> format_bytes(3 * GiB // 2), format_bytes(512)
    ('1.50 GiB', '512 B')
    """
    for size, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Return a short time, such as that of a step, with three digits.

    >>> format_seconds(0.00123), format_seconds(0.123), format_seconds(12.3)
    ('1.23 ms', '123 ms', '12.3 s')
    """
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def format_duration(seconds: float) -> str:
    """Return a long time, such as that of a job, in whole units.

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
    """Return a text in which numbers with many decimals, such as those drawn by a search, have 4 digits.

    >>> shorter_numbers("lr=0.0008311303692128172 decay=4.0438780095151014e-05 betas=[0.9,0.999] width=12345")
    'lr=0.0008311 decay=4.044e-05 betas=[0.9,0.999] width=12345'
    """
    return _LONG.sub(lambda match: f"{float(match[0]):.4g}", text)


def parse_budget(value: object, *, least: int = MiB) -> int:
    """Return the bytes of a text such as ``16GiB``, or of a number.

    Args:
        value: a text with a unit, a text of digits, or a number.
        least: smallest number of bytes without a unit, since ``16`` is more likely 16 GiB than 16 bytes. With a unit,
            any number above 0 is allowed, and 0 if ``least`` is 0.

    >>> parse_budget("16GiB") == 16 * GiB, parse_budget("1.5 MiB") == 3 * MiB // 2, parse_budget("512B")
    (True, True, 512)
    >>> parse_budget("6442450944"), parse_budget(1.6e10), parse_budget(0, least=0)
    (6442450944, 16000000000, 0)

    Raises:
        ValueError: it is no number of B, KiB, MiB, GiB or TiB, and no number of at least ``least``. GB is refused,
            since it means 10**9 to some and 2**30 to others.
    """
    text = value.strip() if isinstance(value, str) else ""
    above = " above 0" if least else ""
    number = int(text) if text.isdecimal() else value
    count, allowed = -1, least
    if match := _BYTES.fullmatch(text):
        count = int(Fraction(match[1]) * 1024 ** " kmgt".index((match[2] or " ")[0].lower()))
        allowed = min(least, 1)
    elif isinstance(number, int) and not isinstance(number, bool):
        count = number
    elif isinstance(number, float) and math.isfinite(number):
        count, allowed = int(number), max(least, MiB)  # 1.5 is no number of bytes, 0.9 * 2**30 is
    if count < allowed:
        raise ValueError(
            f"{value!r}: write a number{above} and one of B, KiB, MiB, GiB, TiB, such as 16GiB, or bytes,"
            f" at least {format_bytes(least)}, such as 17179869184"
        )
    return count
