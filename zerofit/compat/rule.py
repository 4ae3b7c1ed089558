"""Rule: one thing that fails or silently goes wrong, declared whole as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.said import Confidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.compat.evidence import Evidence
    from zerofit.compat.example import Example
    from zerofit.compat.situation import Situation
    from zerofit.document import Place
    from zerofit.edits import Edit


class Severity(StrEnum):
    """What a broken rule means for the run."""

    ERROR = "error"
    """It fails, hangs, or trains something else than was asked for."""
    WARNING = "warning"
    """It runs, and something that was asked for does not happen, or other numbers come out."""
    ADVICE = "advice"
    """It runs right, and slower or larger than it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One place where a rule is broken."""

    found: str
    """What offends, in the user's own words: keys, flags and values."""
    place: Place | None = None
    """Where it stands; None for a flag."""
    fix: str | None = None
    """In place of the rule's own, where the case says more: the nearest valid key, say."""
    why: str | None = None
    """In place of the rule's own, likewise."""
    edits: tuple[Edit, ...] = ()
    """What `check --fix` does, where there is exactly one right answer."""
    confidence: Confidence = Confidence.CERTAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that fails or silently goes wrong, with the reason."""

    id: str
    """Permanent, kebab-case."""
    severity: Severity
    summary: str
    """The rule in one line."""
    why: str
    """The one reason."""
    fix: str
    """What to do. Settings' names in braces, {zero_stage}, are spelt as the user spells them."""
    see: str
    """Where it is documented, or the line of the library's source that does it."""
    find: Callable[[Situation], Iterable[Hit]]
    """Yields each place that breaks the rule; raises Lacking where a fact is not known."""
    bad: Example
    """An example that breaks this rule and no other."""
    good: Example
    """The same, mended; it breaks no rule."""
    evidence: Evidence
    """What the bad example does when it is run."""
    holds_for: tuple[str, ...] = ()
    """Versions, as requirement specifiers such as "deepspeed<0.19.3"; empty for all that zerofit supports."""
    is_put_right_by_launch: bool = False
    """Whether `zerofit launch` cures it inside the run, so that it says nothing there."""


__all__ = ["Confidence", "Hit", "Rule", "Severity"]
