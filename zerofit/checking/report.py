"""Report: the result of `zerofit check` as text: findings, unknown facts, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES, DEEPSPEED_RULES
from zerofit.checking.targets import fixable_together
from zerofit.configs.document import FileKind, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.engine import Finding, Verdict
    from zerofit.checking.targets import TargetFile, Targets

_PLURAL = {
    Severity.ERROR: ("error", "errors"),
    Severity.WARNING: ("warning", "warnings"),
    Severity.ADVICE: ("piece of advice", "pieces of advice"),
}
_ENGINE = "the engine"
_OF_ENGINE = (
    "the ZeRO stage",
    "the optimizer offload",
    "the parameter offload",
    "the offload settings",
    "the folder for NVMe offload",
)
"""Facts that follow from a configuration of DeepSpeed, as rules name them."""
_MAX_RULES = 3
_MAX_NAMES = 5
"""More names would make the last line hard to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a check: its inputs and findings. Printed, it is the output of `zerofit check`."""

    targets: Targets
    """The files, the script with its arguments, and the command that were read."""
    verdict: Verdict
    """All findings, and the rules that lack a fact."""
    strict: bool = False
    """True if warnings fail the check too."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All violations, sorted by file and line."""
        return self.verdict.findings

    @property
    def ok(self) -> bool:
        """True if there are no errors, and with `strict` no warnings."""
        failing = (Severity.ERROR, Severity.WARNING) if self.strict else (Severity.ERROR,)
        return not any(finding.severity in failing for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 if ok, else 1."""
        return 0 if self.ok else 1

    def __str__(self) -> str:
        other = _other_engine(self.targets)
        num_rules = len(ALL_RULES) - (len(DEEPSPEED_RULES) if other else 0)
        text = findings_text(self.verdict, files=self.targets.files, num_rules=num_rules)
        return f"{other}\n\n{text}" if other else text

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def findings_text(verdict: Verdict, *, files: Sequence[TargetFile], num_rules: int) -> str:
    """Return the findings, unknown facts, and a last line with counts.

    Args:
        verdict: the rules' results.
        files: the files that were checked.
        num_rules: number of rules applied.
    """
    blocks = [finding.as_text() for finding in verdict.findings]
    if verdict.unknown or verdict.notes:
        blocks.append("\n".join(unknown_lines(verdict)))
    blocks.append(_last_line(verdict, files, num_rules=num_rules))
    return "\n\n".join(blocks)


_FOREIGN_ENGINES = ("MEGATRON_LM", "TPU", "XLA")
"""Values of accelerate's distributed_type whose sections no rule checks."""
_FSDP = "FSDP"


def _other_engine(targets: Targets) -> str | None:
    """Return what is not checked if accelerate's file selects another engine than DeepSpeed."""
    for file in targets.files:
        kind = file.document.value("distributed_type") if file.document else None
        if file.document is None or kind not in (_FSDP, *_FOREIGN_ENGINES):
            continue
        text = say(file.document, "distributed_type")
        apart = f"with {text} the {len(DEEPSPEED_RULES)} rules of DeepSpeed do not apply"
        if kind == _FSDP:
            return f"not checked: {apart}"
        return f"not checked: {kind.lower()}_config of {file.name}, for which zerofit has no rules; {apart}"
    return None


def unknown_lines(verdict: Verdict) -> tuple[str, ...]:
    """Return one line for each unknown fact, with the rules that need it, and for each note.

    Without an engine all facts are in one line: nothing says that the run is one of DeepSpeed at all.
    """
    rules: dict[str, dict[str, None]] = {}
    for unknown in verdict.unknown:
        rules.setdefault(unknown.fact, {})[unknown.rule] = None
    if _ENGINE in rules:
        others = [fact for fact in rules if fact not in (_ENGINE, *_OF_ENGINE)]
        has_settings = len(rules) - len(others) > 1
        facts = [f"{_ENGINE}, with its ZeRO stage and offload" if has_settings else _ENGINE, *others]
        rules = {"; ".join(facts): {rule: None for ids in rules.values() for rule in ids}}
    return (
        *(f"not checked: {note}" for note in verdict.notes),
        *(f"not checked, because unknown: {fact} ({_few(list(ids))})" for fact, ids in rules.items()),
    )


def _few(ids: list[str]) -> str:
    """Return a few rule ids and the number of others; --json lists all."""
    more = len(ids) - _MAX_RULES
    return ", ".join(ids) if more <= 1 else f"{', '.join(ids[:_MAX_RULES])} and {more} more"


def _last_line(verdict: Verdict, files: Sequence[TargetFile], *, num_rules: int) -> str:
    names = _describe_files(files)
    if verdict.findings:
        found = {severity: len(verdict.of(severity)) for severity in Severity}
        counts = ", ".join(
            f"{number} {_PLURAL[severity][number > 1]}" for severity, number in found.items() if number
        )
        fixable = fixable_together(verdict.findings, files)
        return f"{names}: {counts}" + (f"; --fix fixes {_which(fixable, verdict)}" if fixable else "")
    if files and all(file.has_nothing for file in files):
        return f"nothing to check: {names}"
    num_unknown = len({unknown.rule for unknown in verdict.unknown})
    holding = f"{num_rules - num_unknown} rules passed"
    return f"ok: {names}: {holding}" + (f", {num_unknown} not checked" if num_unknown else "")


def _which(fixable: Sequence[Finding], verdict: Verdict) -> str:
    """Return in words which findings --fix fixes."""
    if len(fixable) == len(verdict.findings):
        return "it" if len(fixable) == 1 else f"all {len(fixable)} of them"
    named = [f"{finding.rule} ({finding.place or 'no line'})" for finding in fixable]
    return f"{len(fixable)} of them: {_few(named)}"


def _describe_files(files: Sequence[TargetFile]) -> str:
    """Return the files' names, each with the place that names it; only their number if there are many."""
    if len(files) > _MAX_NAMES:
        return f"{len(files)} files"
    return ", ".join(map(_describe, files)) or "the command line"


def _describe(file: TargetFile) -> str:
    if file.kind is FileKind.LINES:
        return f"{file.name} ({file.num_lines} launch line{'s' * (file.num_lines != 1)})"
    by = file.named_by
    return f"{file.name} (named by {by.place or by.text})" if by else file.name
