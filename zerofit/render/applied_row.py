"""Row: one setting of a script, what runs in its place, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.plan import Origin

if TYPE_CHECKING:
    from zerofit.plan import Plan

OWN = "its own"
"""What stands for a setting of a script that was not captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    what: str
    """Its name, as a person reads it."""
    script_says: str
    """What the script says, or what it comes to where nothing else is said."""
    runs: str
    why: str


def why_of(plan: Plan, *fields: str) -> str:
    """Return the reason of the first of these fields that has one; that of a flag before all others."""
    found = [reason for field in fields for reason in plan.reasons if reason.field == field]
    by_flag = [reason for reason in found if reason.origin is Origin.FLAG and reason.why.startswith("--")]
    return next((reason.why for reason in (*by_flag, *found)), "the plan says so")
