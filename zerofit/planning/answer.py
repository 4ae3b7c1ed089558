"""Answer: a problem, what its search found and the plan made of it; tables and files are rendered from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerofit.core.plan import Plan
    from zerofit.planning.candidates import Dropped
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy, TrainingResult
    from zerofit.planning.suggestions import Suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that `zerofit plan` says of one machine."""

    problem: Problem
    """As it was solved: with the shorter length, where --allow length took one."""
    found: TrainingResult
    plan: Plan
    """Of the choice, or of the nearest where nothing fits."""
    is_fast: bool
    """True if closed forms stood in for traces."""
    as_it_is: EstimatedStrategy | None = None
    """The strategy of the script without zerofit; None without a script, or where it brings an engine."""
    in_16_bits: EstimatedStrategy | None = None
    """The best in 16 bits, where the choice keeps the fp32 of a script that names no precision."""
    dropped: tuple[Dropped, ...] = ()
    """Candidates that compatibility rules forbid."""
    suggestions: tuple[Suggestion, ...] = ()
    """Where nothing fits: with what it would."""
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""

    @property
    def fits(self) -> bool:
        """True if anything fits."""
        return self.found.chosen is not None

    @property
    def head(self) -> EstimatedStrategy:
        """The choice, or the nearest where nothing fits."""
        head = self.found.chosen or self.found.nearest
        assert head is not None
        return head
