"""Sizes: whole bytes inside, GiB and GB only where a person reads or writes them."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_FACTORS = {
    "": 1,
    "B": 1,
    "K": KIB,
    "M": MIB,
    "G": GIB,
    "T": TIB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Return the whole bytes that a size such as "80G", "1.5 TiB" or "24GB" names.

    Args:
        text: a number and a unit. K, M, G and T alone are binary, as in GiB; KB, MB, GB and TB are decimal.

    Raises:
        ValueError: the text is no size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 80G or 1.5TiB")
    return round(float(match[1]) * factor)


def format_bytes(num_bytes: int) -> str:
    """Return the size in the largest binary unit that keeps it at 1 or above, such as "79.2 GiB"."""
    for name, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {name}"
    return f"{num_bytes} B"
