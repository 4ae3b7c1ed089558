"""Rule: one combination that does not work, declared whole as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.facts import Machine
    from zerofit.plan import Topology
    from zerofit.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a rule looks at."""

    strategy: Strategy
    topology: Topology
    machine: Machine | None = None
    """The node that runs it; None where it is not known, and the rules that ask for it find nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that fails or silently goes wrong, with the reason."""

    id: str
    """Permanent, kebab-case."""
    summary: str
    """The rule in one line."""
    why: str
    """The one reason."""
    fix: str
    """What to do."""
    see: str
    """Where it is documented or was seen."""
    found: Callable[[Situation], str | None]
    """What offends, in the user's terms; None where nothing does."""
    bad: Situation
    """An example that breaks the rule."""
    good: Situation
    """The same, mended."""


def broken_rules(situation: Situation, *, rules: Iterable[Rule]) -> tuple[UserError, ...]:
    """Return one error for each rule that the situation breaks, in the order of the rules."""
    return tuple(
        UserError(rule.id, rule.summary, found=found, why=rule.why, fix=rule.fix, see=rule.see)
        for rule in rules
        if (found := rule.found(situation)) is not None
    )
