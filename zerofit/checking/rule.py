"""Rule: a check for one thing that fails or silently goes wrong, declared as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from zerofit.configs.document import say
from zerofit.core.setting import Confidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document, Edit
    from zerofit.core.setting import Place, Said


ACCELERATE = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed"
DEEPSPEED_DOCS = "https://www.deepspeed.ai/docs/config-json/"
"""Base URLs of the rules' sources."""
Predicate: TypeAlias = "Callable[[Situation], Iterable[Hit]]"


class Severity(StrEnum):
    """The effect of a violation on the run."""

    ERROR = "error"
    """The run fails, hangs, or trains something else than requested."""
    WARNING = "warning"
    """The run works, but a setting has no effect, or results differ."""
    ADVICE = "advice"
    """The run is correct, but slower or larger than necessary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One violation of a rule."""

    found: str
    """The offending keys, flags and values, as the user wrote them."""
    place: Place | None = None
    """Its position; None for a flag."""
    fix: str | None = None
    """A more specific fix than the rule's own, such as the nearest valid key."""
    why: str | None = None
    """A more specific reason than the rule's own."""
    edits: tuple[Edit, ...] = ()
    """The edits of `check --fix`, if there is exactly one right answer."""
    confidence: Confidence = Confidence.CERTAIN


def hit_at(document: Document, path: Sequence[str], *others: str, **more: Any) -> Hit:
    """Return a hit for a key of a file, or a missing key: "KEY=VALUE with OTHER".

    Args:
        document: the file.
        path: of the key.
        others: what the key is combined with, in the user's spelling.
        more: other fields of the hit.
    """
    entry = document.at(*path)
    place = document.place(entry.key_span) if entry else None
    return Hit(**{"found": " with ".join((say(document, *path), *others)), "place": place, **more})


def hit_of(said: Said[Any], behind: str = "", **more: Any) -> Hit:
    """Return a hit for a setting, with its confidence: its text, followed by `behind`."""
    return Hit(found=f"{said.text}{behind}", place=said.place, confidence=said.confidence, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check for one thing that fails or silently goes wrong, with the reason."""

    id: str
    """Permanent, kebab-case."""
    severity: Severity
    summary: str
    """The rule in one line."""
    why: str
    """The reason, one only."""
    fix: str
    """The fix. Settings in braces, {zero_stage}, are spelt as the user does."""
    see: str
    """Its documentation, or the line of the library's source."""
    evidence: Reproduction
    """What happened when its bad example ran; tests/checking/rules/rule_examples has a bad and a good one."""
    holds_for: tuple[str, ...] = ()
    """Versions, as requirement specifiers such as "deepspeed<0.19.3"; empty for all that zerofit supports."""
    is_fixed_by_launch: bool = False
    """True if `zerofit launch` fixes it inside the run; the rule is then skipped there."""
    find: Predicate = lambda situation: ()
    """Yields each violation; raises UnknownFact if a fact is unknown."""

    def __call__(self, find: Predicate) -> Rule:
        """Return the rule with its predicate, as a decorator."""
        return dataclasses.replace(self, find=find)


def declared(names: Mapping[str, object]) -> tuple[Rule, ...]:
    """Return the rules in a module's namespace, in order of definition."""
    return tuple(value for value in names.values() if isinstance(value, Rule))


class Effect(StrEnum):
    """How a bad example goes wrong."""

    FAILS = "fails"
    """The run ends in an error."""
    HANGS = "hangs"
    """The run does not end."""
    DIFFERS = "differs"
    """The run ends with other weights than the good example's."""
    IGNORED = "ignored"
    """The run ends, but the engine ignores the setting."""
    COSTS = "costs"
    """The run ends with the right weights, but is slower or larger."""
    REFUSED = "refused"
    """zerofit refuses it before anything is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The observed result, or the reason why there is none."""

    outcome: Effect
    says: str = ""
    """Part of the error message, if it fails."""
    observed: tuple[tuple[str, Any], ...] = ()
    """Settings of the running engine that differ from the requested ones: (("zero_stage", 0),)."""
    not_reproduced: str = ""
    """Why the harness can't run it: "needs a GPU"; the rule's `see` is then the evidence."""


HANGS = Reproduction(outcome=Effect.HANGS)
DIFFERS = Reproduction(outcome=Effect.DIFFERS)
COSTS = Reproduction(outcome=Effect.COSTS)
REFUSED = Reproduction(outcome=Effect.REFUSED)


def fails(says: str = "", *, not_reproduced: str = "") -> Reproduction:
    """Return the evidence that a run fails; arguments as in Reproduction."""
    return Reproduction(outcome=Effect.FAILS, says=says, not_reproduced=not_reproduced)


def ignored(*observed: tuple[str, Any], not_reproduced: str = "") -> Reproduction:
    """Return the evidence that the engine ignores a setting; arguments as in Reproduction."""
    return Reproduction(outcome=Effect.IGNORED, observed=observed, not_reproduced=not_reproduced)
