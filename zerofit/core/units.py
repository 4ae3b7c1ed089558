"""Sizes: integer bytes inside, GiB and GB only in input and output; durations as displayed."""

from __future__ import annotations

import re
from fractions import Fraction

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def format_bytes(num_bytes: int, *, digits: int = 1) -> str:
    """Return the size in the largest binary unit that keeps it at 1 or above, such as "79.2 GiB"."""
    for name, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.{digits}f} {name}"
    return f"{num_bytes} B"


def format_apart(number: int, other: int) -> tuple[str, str]:
    """Return two sizes with as many digits as it takes to tell them apart, if they differ."""
    texts = (
        ("", ""),
        *((format_bytes(number, digits=n), format_bytes(other, digits=n)) for n in range(1, 13)),
    )
    return next((pair for pair in texts if pair[0] != pair[1]), texts[1])


_NUMBER = r"(\d{1,12}(?:\.\d{1,12})?)"
_SIZE = re.compile(rf"{_NUMBER}\s*([KMGTP])(I?B?)", re.IGNORECASE)
_RATE = re.compile(rf"{_NUMBER}\s*([KMGTkmgt])(bits?|b|bytes?|B)(?:/s|ps)")
_MOST = 2**60
"""No machine has an EiB; below it, sums and products of bytes fit in 64 bits."""


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "512G", "1.5T", "256GiB" or "80GB".

    A letter alone is binary, as in Slurm, Docker and ulimit: "512G" is 512 GiB. Only "GB" is 10^9.

    Raises:
        ValueError: not a size, no unit, or 1 EiB or more.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[3].upper() == "I":
        raise ValueError(f"{text!r} is not a size with a unit, such as 512G (GiB), 512GiB or 512GB (10^9)")
    base = 1000 if match[3].upper() == "B" else 1024
    num_bytes = int(Fraction(match[1]) * base ** ("KMGTP".index(match[2].upper()) + 1))
    if num_bytes > _MOST:
        raise ValueError(f"{text!r} is more than any machine has")
    return num_bytes


def parse_bytes_per_s(text: str) -> float:
    """Return the bytes per second of a rate such as "400Gb/s", "100Gbps" (bits) or "50GB/s" (bytes).

    Raises:
        ValueError: not a rate, or ambiguous between bits and bytes.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a rate with a unit, such as 400Gb/s (bits) or 50GB/s (bytes)")
    per_s = Fraction(match[1]) * 1000 ** ("KMGT".index(match[2].upper()) + 1)
    bytes_per_s = per_s if match[3].startswith(("B", "byte")) else per_s / 8
    if bytes_per_s > _MOST:
        raise ValueError(f"{text!r} is more than any machine has")
    return float(bytes_per_s)


def percent(share: float) -> str:
    """Return a share of 0 or more in percent with at least two significant digits: "12.3%", "0.41%"."""
    value = share * 100
    if value == 0:
        return "0%"
    if value < 0.01:
        return "<0.01%"
    return f"{value:.2f}%" if value < 1 else f"{value:.1f}%"


def format_duration(duration_s: float) -> str:
    """Return a time in its two largest units: "2 h 5 min", "3 min 20 s"."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
