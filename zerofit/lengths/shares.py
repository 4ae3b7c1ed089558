"""A share as text: the one form in which tables and reasons give it."""

from __future__ import annotations


def percent(share: float) -> str:
    """Return a share of 0 or more in percent, two digits at least that say something: "12.3%", "0.41%"."""
    value = share * 100
    if value == 0:
        return "0%"
    if value < 0.01:
        return "<0.01%"
    return f"{value:.2f}%" if value < 1 else f"{value:.1f}%"
