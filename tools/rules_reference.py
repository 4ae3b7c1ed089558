"""docs/reference/rules.md: the page of every rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.pages.rule_pages import rule_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.rule import Rule

_HEAD = """\
<!-- Written by `make docs` from zerofit/checking/rules/: edit the rules there. -->
# Rules of zerofit check

An **error** fails, hangs, or trains something else than requested. A **warning** runs, but a setting has no
effect, or results differ. **Advice** is correct, but slower or larger than necessary.
`zerofit check --explain RULE` prints one rule of this page.

"""


def rules_reference(rules: Sequence[Rule]) -> str:
    """Return the reference of all rules: a table of them all, then each one's page."""
    ordered = sorted(rules, key=lambda rule: rule.id)
    rows = ["| rule | severity | what it says |", "|---|---|---|"]
    rows += [f"| [{rule.id}](#{rule.id}) | {rule.severity} | {_cell(rule.summary)} |" for rule in ordered]
    pages = [rule_page(rule, level=2) for rule in ordered]
    return _HEAD + "\n".join(rows) + "\n\n" + "\n".join(pages)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
