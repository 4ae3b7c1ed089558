"""docs/reference/rules.md in git: a line for each rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zerofit.checking.rule import Rule

_HEAD = """\
<!-- Written by `make docs` from zerofit/checking/rules/: edit the rules there. -->
# Rules of zerofit check

An **error** fails, hangs, or trains something else than requested. A **warning** runs, but a setting has no
effect, or results differ. **Advice** is correct, but slower or larger than necessary.
`zerofit rule ID` explains one rule: why, what to do, and what happened when it was broken.

| rule | severity | what it says |
|---|---|---|
"""


def rules_index(rules: Iterable[Rule], name: Callable[[Rule], str] = lambda rule: _anchored(rule.id)) -> str:
    """Return the index of all rules: id, severity and summary of each.

    Args:
        rules: the rules.
        name: returns the Markdown of a rule's first cell; by default an anchor, to which other pages link.
    """
    rows = (
        "| {} | {} | {} |\n".format(name(rule), rule.severity, rule.summary.replace("|", "\\|"))
        for rule in sorted(rules, key=lambda rule: rule.id)
    )
    return _HEAD + "".join(rows)


def _anchored(name: str) -> str:
    return f'<a id="{name}"></a>`{name}`'
