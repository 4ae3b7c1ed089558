"""A rule's page, as `zerofit rule ID` prints it; and the list of all rules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from zerofit.checking.engine import DEEPSPEED_NAMES, spell
from zerofit.checking.rule import Effect
from zerofit.core.overrides import FLAGS
from zerofit.core.text_table import folded_table_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.checking.rule import Reproduction, Rule

_SEEN = {
    Effect.FAILS: "the run ends in an error",
    Effect.HANGS: "the run does not end",
    Effect.DIFFERS: "the run succeeds with wrong weights",
    Effect.IGNORED: "the run succeeds, but the setting has no effect",
    Effect.COSTS: "the run succeeds with the right weights, but is slower or larger than necessary",
    Effect.REFUSED: "zerofit refuses it before anything is trained",
}
_NAMES = {
    name: key if FLAGS.get(name, key) == key else f"{key} ({FLAGS[name]})"
    for name, key in DEEPSPEED_NAMES.items()
}
"""Names of settings on a page: DeepSpeed's key, and zerofit's flag."""


def rule_page(rule: Rule, *, level: int = 1) -> str:
    """Return the page of one rule, as Markdown.

    Args:
        rule: the rule.
        level: heading level of its title.
    """
    lines = [
        f"{'#' * level} {rule.id}",
        "",
        f"**{rule.severity}**: {rule.summary}.",
        "",
        f"- why: {rule.why}",
        f"- fix: {fix_text(rule)}",
        f"- seen: {seen_text(rule.evidence)}",
        f"- see: <{rule.see}>",
    ]
    if rule.holds_for:
        lines.append(f"- holds for: {', '.join(f'`{versions}`' for versions in rule.holds_for)}")
    if rule.is_fixed_by_launch:
        lines.append("- `zerofit launch` fixes it inside the run")
    return "\n".join(lines) + "\n"


def rules_table(rules: Iterable[Rule], *, width: int | None = None) -> str:
    """Return a table of rules: severity, id and summary, in lines of at most `width` columns."""
    ordered = sorted(rules, key=lambda rule: rule.id)
    rows = [(rule.severity.value, rule.id, rule.summary) for rule in ordered]
    return "\n".join(folded_table_lines(rows, width=width))


def fix_text(rule: Rule) -> str:
    """Return the fix, with each setting as DeepSpeed's key and zerofit's flag."""
    return spell(rule.fix, _NAMES)


def seen_text(evidence: Reproduction) -> str:
    """Return what happened when the rule's bad example ran."""
    text = _SEEN[evidence.outcome]
    if evidence.says:
        text += f": `{evidence.says}`"
    if evidence.observed:
        text += ": " + ", ".join(f"`{name}` is {json.dumps(value)}" for name, value in evidence.observed)
    if evidence.not_reproduced:
        text += f" (documented, not reproduced: {evidence.not_reproduced})"
    return text
