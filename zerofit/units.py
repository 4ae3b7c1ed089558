"""Sizes: whole bytes inside, GiB and GB only where a person reads or writes them."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def format_bytes(num_bytes: int) -> str:
    """Return the size in the largest binary unit that keeps it at 1 or above, such as "79.2 GiB"."""
    for name, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {name}"
    return f"{num_bytes} B"
