"""Rule: one thing that fails or silently goes wrong, declared whole as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from zerofit.configs.document import say
from zerofit.core.setting import Confidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document, Edit
    from zerofit.core.command import Route
    from zerofit.core.facts import Checkpoint, Machine
    from zerofit.core.plan import Topology
    from zerofit.core.setting import Place, Said
    from zerofit.core.strategy import Strategy


Predicate: TypeAlias = "Callable[[Situation], Iterable[Hit]]"


class Severity(StrEnum):
    """The effect of a broken rule on the run."""

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
    """The offending keys, flags and values, as the user wrote them."""
    place: Place | None = None
    """Where it stands; None for a flag."""
    fix: str | None = None
    """In place of the rule's own, where the case says more: the nearest valid key, say."""
    why: str | None = None
    """In place of the rule's own, likewise."""
    edits: tuple[Edit, ...] = ()
    """The edit of `check --fix`, where there is exactly one right answer."""
    confidence: Confidence = Confidence.CERTAIN


def hit_at(document: Document, path: Sequence[str], *others: str, **more: Any) -> Hit:
    """Return a hit at a key of a file, or a missing one: "KEY=VALUE with OTHER".

    Args:
        document: the file.
        path: of the key.
        others: what the key is combined with, in the user's words.
        more: other fields of the hit.
    """
    entry = document.at(*path)
    place = document.place(entry.key_span) if entry else None
    return Hit(**{"found": " with ".join((say(document, *path), *others)), "place": place, **more})


def hit_of(said: Said[Any], behind: str = "", **more: Any) -> Hit:
    """Return a hit at a setting, as sure as it is: its text, and what stands behind that."""
    return Hit(found=f"{said.text}{behind}", place=said.place, confidence=said.confidence, **more)


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
    """The fix. Settings' names in braces, {zero_stage}, are spelt as the user spells them."""
    see: str
    """Where it is documented, or the line of the library's source that does it."""
    bad: Example
    """An example that breaks this rule and no other."""
    good: Example
    """The same, mended; it breaks no rule."""
    evidence: Reproduction
    """The outcome of running the bad example."""
    holds_for: tuple[str, ...] = ()
    """Versions, as requirement specifiers such as "deepspeed<0.19.3"; empty for all that zerofit supports."""
    is_put_right_by_launch: bool = False
    """True if `zerofit launch` fixes it inside the run; the rule is then not asked there."""
    find: Predicate = lambda situation: ()
    """Yields each place that breaks the rule; raises Lacking where a fact is not known."""

    def __call__(self, find: Predicate) -> Rule:
        """Return the rule with its predicate, which it decorates."""
        return dataclasses.replace(self, find=find)


def declared(names: Mapping[str, object]) -> tuple[Rule, ...]:
    """Return the rules among the names of a module, in the order in which they stand there."""
    return tuple(value for value in names.values() if isinstance(value, Rule))


class Effect(StrEnum):
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
class Reproduction:
    """The observed outcome, or the reason why there is none."""

    outcome: Effect
    says: str = ""
    """Part of the error's text, where it fails."""
    observed: tuple[tuple[str, Any], ...] = ()
    """Settings that the running engine shows in place of the requested ones: (("zero_stage", 0),)."""
    not_reproduced: str = ""
    """Why the harness can't run it: "needs a GPU"; the rule's `see` is then its evidence."""


HANGS = Reproduction(outcome=Effect.HANGS)
DIFFERS = Reproduction(outcome=Effect.DIFFERS)
COSTS = Reproduction(outcome=Effect.COSTS)


def fails(says: str = "", *, not_reproduced: str = "") -> Reproduction:
    """Return the evidence that a run ends in an error; arguments as in Reproduction."""
    return Reproduction(outcome=Effect.FAILS, says=says, not_reproduced=not_reproduced)


def ignored(*observed: tuple[str, Any], not_reproduced: str = "") -> Reproduction:
    """Return the evidence that the engine does not do what was asked for; arguments as in Reproduction."""
    return Reproduction(outcome=Effect.IGNORED, observed=observed, not_reproduced=not_reproduced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The layers of a run; what is None is not there."""

    deepspeed: Mapping[str, Any] | str | None = None
    """ds_config.json, as a mapping or as the text itself."""
    accelerate: Mapping[str, Any] | str | None = None
    """accelerate.yaml."""
    route: Route | None = None
    """Who reads the DeepSpeed configuration, where no script says it."""
    command: str | None = None
    """The command line up to the script: "accelerate launch --zero_stage 3"."""
    script: str | None = None
    """The source of train.py."""
    arguments: str = ""
    """The script's own arguments, as in a shell."""
    strategy: Strategy | None = None
    """zerofit's own flags, in place of files."""
    topology: Topology | None = None
    machine: Machine | None = None
    checkpoint: Checkpoint | None = None
    """The checkpoint to resume from."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions other than those that zerofit is tested with: {"deepspeed": "0.18.0"}."""
