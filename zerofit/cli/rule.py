"""zerofit rule: the page of a rule, or the list of all rules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from zerofit.checking.rule_pages import fix_text, rule_page, rules_table, seen_text
from zerofit.checking.rules import ALL_RULES
from zerofit.cli.completion import complete_words
from zerofit.cli.output.console import echo, terminal_width
from zerofit.cli.parameters import CONTEXT, Verb
from zerofit.cli.shared_options import json_option
from zerofit.core.errors import UserError, nearest

if TYPE_CHECKING:
    from zerofit.checking.rule import Rule


@click.command(cls=Verb, context_settings=CONTEXT)
@click.argument(
    "name",
    required=False,
    metavar="[RULE]",
    shell_complete=complete_words(rule.id for rule in ALL_RULES),
)
@json_option
def rule(*, name: str | None, as_json: bool) -> None:
    """Explain a rule of zerofit check, or list all rules.

    RULE is the id in a finding's brackets, as in error[param-offload-needs-zero3].
    """
    if name is not None:
        found = _find(name)
        echo(json.dumps(_fields(found), indent=2) if as_json else rule_page(found).rstrip("\n"))
    elif as_json:
        echo(json.dumps([_fields(rule) for rule in ALL_RULES], indent=2))
    else:
        echo(rules_table(ALL_RULES, width=terminal_width()))


def _find(name: str) -> Rule:
    rules = {rule.id: rule for rule in ALL_RULES}
    if name in rules:
        return rules[name]
    near = nearest(name, rules)
    raise UserError(
        "unknown-rule",
        f"there is no rule {name!r}",
        found=f"zerofit rule {name}",
        why="`zerofit rule` does not list it",
        fix=f"did you mean zerofit rule {near}?" if near else "see zerofit rule",
    )


def _fields(rule: Rule) -> dict[str, Any]:
    return {
        "rule": rule.id,
        "severity": rule.severity.value,
        "summary": rule.summary,
        "why": rule.why,
        "fix": fix_text(rule),
        "seen": seen_text(rule.evidence),
        "see": rule.see,
        "holds_for": list(rule.holds_for),
        "is_fixed_by_launch": rule.is_fixed_by_launch,
    }
