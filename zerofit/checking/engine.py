"""The rule engine: applies rules to a Situation, and collects findings and unknowns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.rule import Severity
from zerofit.checking.situation import UnknownFact, known
from zerofit.core.command import Launcher
from zerofit.core.errors import UserError, format_message
from zerofit.core.setting import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerofit.checking.rule import Hit, Rule
    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Edit
    from zerofit.core.facts import Versions
    from zerofit.core.setting import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violation of a rule, with everything that is printed about it."""

    rule: str
    """The rule's id."""
    severity: Severity
    """The rule's own; at most a warning if not certain."""
    confidence: Confidence
    summary: str
    found: str
    why: str
    fix: str
    see: str
    place: Place | None
    edits: tuple[Edit, ...]

    def as_error(self) -> UserError:
        """Return the finding as an error that ends a command."""
        return UserError(
            self.rule, self.summary, found=self.located, why=self.why, fix=self.fix, see=self.see
        )

    def as_text(self) -> str:
        """Return the finding as printed."""
        certainty = "" if self.confidence is Confidence.CERTAIN else f" ({self.confidence})"
        return format_message(
            f"{self.severity}[{self.rule}]: {self.summary}{certainty}",
            found=self.located,
            why=self.why,
            fix=self.fix,
            see=self.see,
        )

    @property
    def located(self) -> str:
        """The value found, followed by its file and line."""
        return f"{self.found}   ({self.place})" if self.place else self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecidedRule:
    """A rule that could not be decided."""

    rule: str
    """The rule's id."""
    fact: str
    """The missing facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The results of all rules for a situation."""

    findings: tuple[Finding, ...] = ()
    """Sorted by file and line, then severity, then rule; findings without a file come first."""
    unknown: tuple[UndecidedRule, ...] = ()
    """In the order of the rules."""
    notes: tuple[str, ...] = ()
    """What is not checked, and why."""

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity is severity)


_ORDER = {severity: number for number, severity in enumerate(Severity)}


def check(situation: Situation, *, rules: Iterable[Rule]) -> Verdict:
    """Return the results of all rules for a situation."""
    findings: list[Finding] = []
    unknown: list[UndecidedRule] = []
    for rule in rules:
        if rule.is_fixed_by_launch and situation.launcher is Launcher.ZEROFIT:
            continue
        try:
            for hit in rule.find(situation):
                # Imported late: parsing specifiers takes longer than all rules together.
                if all(_is_satisfied(specifier, situation.versions) for specifier in rule.holds_for):
                    findings.append(_finding(rule, hit, situation))
        except UnknownFact as lacking:
            unknown.append(UndecidedRule(rule=rule.id, fact=lacking.fact))
    return Verdict(findings=sort_findings(findings), unknown=tuple(unknown))


def refuse(situation: Situation, *, rules: Iterable[Rule]) -> None:
    """Check what is known of a run by some rules, before a plan is made.

    Raises:
        UserError: one rule forbids it.
        ExceptionGroup: of one UserError for each of several rules.
    """
    errors = [finding.as_error() for finding in check(situation, rules=rules).of(Severity.ERROR)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("settings that don't work", errors)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in printing order, without duplicates."""
    return tuple(sorted(dict.fromkeys(findings), key=_place_in_output))


def _place_in_output(finding: Finding) -> tuple[str, int, int, int, str]:
    place = finding.place
    where = (place.file, place.line, place.column) if place else ("", 0, 0)
    return (*where, _ORDER[finding.severity], finding.rule)


def _finding(rule: Rule, hit: Hit, situation: Situation) -> Finding:
    severity = rule.severity
    if severity is Severity.ERROR and hit.confidence is not Confidence.CERTAIN:
        severity = Severity.WARNING
    return Finding(
        rule=rule.id,
        severity=severity,
        confidence=hit.confidence,
        summary=rule.summary,
        found=_printable(hit.found),
        why=_printable(hit.why) if hit.why else rule.why,
        fix=_printable(hit.fix) if hit.fix else spell(rule.fix, situation.settings.names),
        see=rule.see,
        place=hit.place,
        edits=hit.edits,
    )


DEEPSPEED_NAMES = {
    "engine": "--engine",
    "zero_stage": "zero_optimization.stage",
    "optimizer_offload": "offload_optimizer",
    "param_offload": "offload_param",
    "nvme_path": "nvme_path",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "optimizer": "the optimizer",
    "precision": "bf16.enabled or fp16.enabled",
}
"""DeepSpeed's names of settings."""


def spell(text: str, names: Mapping[str, str]) -> str:
    """Return a rule's text with settings in braces spelt as the user does."""
    spelt = {**DEEPSPEED_NAMES, **names}
    return re.sub(r"{(\w+)}", lambda match: spelt.get(match[1], match[0]), text)


def _printable(text: str) -> str:
    """Return a user's text with control characters, including newlines, as Python escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _is_satisfied(specifier: str, versions: Versions | None) -> bool:
    from packaging.requirements import Requirement

    requirement = Requirement(specifier)
    version = known(
        getattr(versions, requirement.name, None), f"the version of {requirement.name} that will run"
    )
    return requirement.specifier.contains(version, prereleases=True)
