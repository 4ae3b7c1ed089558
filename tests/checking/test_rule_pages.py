"""A rule's page, and the list of rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rule_situations import wrong_in

from tools.rules_index import rules_index
from zerofit.checking.rule_pages import rule_page, rules_table
from zerofit.checking.rules import ALL_RULES

if TYPE_CHECKING:
    from zerofit.checking.rule import Rule

_PARAM_OFFLOAD = next(rule for rule in ALL_RULES if rule.id == "param-offload-needs-zero3")


def test_page(golden: Callable[[str, str], None]) -> None:
    golden(rule_page(_PARAM_OFFLOAD), "findings/param-offload-needs-zero3.md")


def _wrong_in_page(rule: Rule) -> Iterator[str]:
    page = rule_page(rule)
    if not page.startswith(f"# {rule.id}\n\n**{rule.severity}**: {rule.summary}.\n"):
        yield f"its page begins with {page[:100]!r}"
    if not page.endswith("\n") or page.endswith("\n\n"):
        yield f"its page ends with {page[-20:]!r}"
    if fields := re.findall(r"\{\w+\}", page):
        yield f"its page keeps {fields}"


def test_every_page_is_whole() -> None:
    assert wrong_in(ALL_RULES, _wrong_in_page) == []


def test_the_index_has_a_line_and_an_anchor_for_each_rule() -> None:
    lines = rules_index(ALL_RULES).splitlines()
    rows = [line for line in lines if line.startswith("| <a")]
    assert rows == [
        f'| <a id="{rule.id}"></a>`{rule.id}` | {rule.severity} | ' + rule.summary.replace("|", "\\|") + " |"
        for rule in sorted(ALL_RULES, key=lambda rule: rule.id)
    ]


def test_the_list_has_a_line_for_each_rule() -> None:
    lines = rules_table(ALL_RULES).splitlines()
    assert [line.split()[1] for line in lines] == sorted(rule.id for rule in ALL_RULES)
