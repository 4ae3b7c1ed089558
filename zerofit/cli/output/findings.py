"""A Verdict as text for a person: each finding whole, what is not known, and a last line with counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Severity
from zerofit.checking.targets import is_mendable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.engine import Verdict
    from zerofit.checking.targets import TargetFile

_PLURAL = {
    Severity.ERROR: ("error", "errors"),
    Severity.WARNING: ("warning", "warnings"),
    Severity.ADVICE: ("piece of advice", "pieces of advice"),
}
_MOST_RULES = 3
_MOST_NAMES = 5
"""More names than this make the last line hard to read."""


def findings_text(verdict: Verdict, *, files: Sequence[TargetFile], num_rules: int) -> str:
    """Return the whole text.

    Args:
        verdict: what the rules say.
        files: the files that were checked.
        num_rules: how many rules were asked.
    """
    blocks = [finding.as_text() for finding in verdict.findings]
    if verdict.unknown:
        blocks.append("\n".join(unknown_lines(verdict)))
    blocks.append(_last_line(verdict, files, num_rules=num_rules))
    return "\n\n".join(blocks)


def unknown_lines(verdict: Verdict) -> tuple[str, ...]:
    """Return one line for each fact that is not known, with the rules that ask for it."""
    rules: dict[str, list[str]] = {}
    for unknown in verdict.unknown:
        rules.setdefault(unknown.fact, []).append(unknown.rule)
    return tuple(
        f"not checked, as it is not known: {fact} ({_some(list(dict.fromkeys(ids)))})"
        for fact, ids in rules.items()
    )


def _some(ids: list[str]) -> str:
    """Return a few rules by name and how many more there are; --json names them all."""
    more = len(ids) - _MOST_RULES
    return ", ".join(ids) if more <= 1 else f"{', '.join(ids[:_MOST_RULES])} and {more} more"


def counts(verdict: Verdict) -> str:
    """Return how many findings there are of each severity: "1 error, 2 warnings"."""
    found = {severity: len(verdict.of(severity)) for severity in Severity}
    return ", ".join(
        f"{number} {_PLURAL[severity][number > 1]}" for severity, number in found.items() if number
    )


def describe_files(files: Sequence[TargetFile]) -> str:
    """Return the files' names, each with what names it where the user did not; of many only the number."""
    names = []
    for file in files:
        by = file.named_by
        names.append(f"{file.name} (named by {by.place or by.text})" if by else file.name)
    if len(names) > _MOST_NAMES:
        return f"{len(names)} files"
    return ", ".join(names) or "the command line"


def _last_line(verdict: Verdict, files: Sequence[TargetFile], *, num_rules: int) -> str:
    names = describe_files(files)
    if verdict.findings:
        num_fixable = sum(is_mendable(finding, files) for finding in verdict.findings)
        hint = f"; --fix mends {num_fixable} of them" if num_fixable else ""
        return f"{names}: {counts(verdict)}{hint}"
    num_unknown = len({unknown.rule for unknown in verdict.unknown})
    holding = f"{num_rules - num_unknown} rules hold"
    return f"ok: {names}: {holding}" + (f", {num_unknown} not checked" if num_unknown else "")
