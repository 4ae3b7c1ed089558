"""Evidence: what a rule's bad example does when it is run, as the harness in tests/evidence shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a bad example goes wrong."""

    FAILS = "fails"
    """The run ends in an error."""
    HANGS = "hangs"
    """The run does not end."""
    DIFFERS = "differs"
    """The run ends well with other weights than the reference, which is the good example's run."""
    IGNORED = "ignored"
    """The run ends well, and what was asked for is not what the engine does."""
    COSTS = "costs"
    """The run ends well with the right weights; it is slower or larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen, or why it could not be."""

    outcome: Outcome
    says: str = ""
    """Part of the error's text, where it fails."""
    observed: tuple[tuple[str, Any], ...] = ()
    """What the running engine shows in place of what was asked for: (("zero_stage", 0),)."""
    not_reproduced: str = ""
    """Why the harness can't run it: "needs a GPU"; the rule's `see` is then its evidence."""
