"""zerofit rule: a page, the list, JSON and misspelt ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.checking.rules import ALL_RULES

if TYPE_CHECKING:
    from runs import RunZerofit

_GOLDEN = Path(__file__).parents[1] / "golden/findings/param-offload-needs-zero3.md"
_FIELDS = ["rule", "severity", "summary", "why", "fix", "seen", "see", "holds_for", "is_fixed_by_launch"]


def test_a_rule_is_its_page(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    page = run_zerofit("rule", "param-offload-needs-zero3", cwd=tmp_path)
    assert (page.stdout, page.stderr, page.returncode) == (_GOLDEN.read_text(), "", 0)


def test_without_a_rule_it_lists_all(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    listed = run_zerofit("rule", cwd=tmp_path, environment={"COLUMNS": "200"})
    assert listed.returncode == 0
    ids = [line.split()[1] for line in listed.stdout.splitlines()]
    assert ids == sorted(rule.id for rule in ALL_RULES)


def test_the_list_of_rules_fits_a_narrow_terminal(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    lines = run_zerofit("rule", cwd=tmp_path, environment={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80


def test_json_is_a_rule_or_all_of_them(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    page = json.loads(run_zerofit("rule", "nvme-needs-path", "--json", cwd=tmp_path).stdout)
    assert list(page) == _FIELDS
    assert (page["rule"], page["severity"]) == ("nvme-needs-path", "error")
    listed = json.loads(run_zerofit("rule", "--json", cwd=tmp_path).stdout)
    assert {rule["rule"] for rule in listed} == {rule.id for rule in ALL_RULES}
    assert page in listed


def test_a_misspelt_rule_gets_the_nearest(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    ended = run_zerofit("rule", "param-ofload-needs-zero3", cwd=tmp_path)
    assert (ended.stdout, ended.returncode) == ("", 2)
    assert ended.stderr == (
        "error[unknown-rule]: there is no rule 'param-ofload-needs-zero3'\n"
        "  found: zerofit rule param-ofload-needs-zero3\n"
        "  why:   `zerofit rule` does not list it\n"
        "  fix:   did you mean zerofit rule param-offload-needs-zero3?\n"
    )
