"""Findings as text and as JSON, whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from verdicts import FILES, VERDICT

from zerofit.checking.engine import UndecidedRule, Verdict
from zerofit.checking.report import findings_text, unknown_lines
from zerofit.cli.output.findings_json import findings_json


def test_text(golden: Callable[[str, str], None]) -> None:
    golden(findings_text(VERDICT, files=FILES, num_rules=40) + "\n", "findings/all.txt")


def test_json(golden: Callable[[str, str], None]) -> None:
    golden(findings_json(VERDICT, files=FILES, num_rules=40) + "\n", "findings/all.json")


@pytest.mark.parametrize(
    ("verdict", "files", "expected"),
    [
        (Verdict(), FILES[:1], "ok: acc.yaml: 40 rules passed"),
        (
            Verdict(),
            FILES[:2],
            "ok: acc.yaml, conf/my ds.json (named by acc.yaml:2): 40 rules passed",
        ),
        (Verdict(), FILES[:1] * 6, "ok: 6 files: 40 rules passed"),
        (Verdict(), (), "ok: the command line: 40 rules passed"),
        (
            replace(VERDICT, findings=()),
            FILES[:1],
            "not checked, because unknown: the optimizer, which the script creates "
            "(offload-needs-adam, muon-needs-matrices)\n"
            "not checked, because unknown: the GPUs that will run it (bf16-needs-ampere)\n\n"
            "ok: acc.yaml: 37 rules passed, 3 not checked",
        ),
    ],
)
def test_what_breaks_no_rule(verdict: Verdict, files: tuple[object, ...], expected: str) -> None:
    assert findings_text(verdict, files=files, num_rules=40) == expected  # type: ignore[arg-type]


def _unknown(*facts: str) -> tuple[str, ...]:
    unknown = tuple(UndecidedRule(rule=f"rule-{number}", fact=fact) for number, fact in enumerate(facts))
    return unknown_lines(Verdict(unknown=unknown))


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        (("the engine",), ("the engine (rule-0)",)),
        (("the ZeRO stage", "the engine"), ("the engine, with its ZeRO stage and offload (rule-0, rule-1)",)),
        (
            ("the engine", "the optimizer offload", "the GPUs that will run it"),
            (
                "the engine, with its ZeRO stage and offload; the GPUs that will run it (rule-0, rule-1, "
                "rule-2)",
            ),
        ),
        (
            (
                "the engine",
                "the parameter offload",
                "the offload settings",
                "the folder for NVMe offload",
                "x",
            ),
            ("the engine, with its ZeRO stage and offload; x (rule-0, rule-1, rule-2 and 2 more)",),
        ),
        (
            ("the ZeRO stage", "the GPUs that will run it"),
            ("the ZeRO stage (rule-0)", "the GPUs that will run it (rule-1)"),
        ),
        ((), ()),
    ],
)
def test_without_an_engine_all_that_is_not_checked_is_in_one_line(
    facts: tuple[str, ...], lines: tuple[str, ...]
) -> None:
    assert _unknown(*facts) == tuple(f"not checked, because unknown: {line}" for line in lines)


def test_json_has_each_finding_in_the_order_of_the_text() -> None:
    document = json.loads(findings_json(VERDICT, files=FILES, num_rules=40))
    assert document["counts"] == {"error": 2, "warning": 2, "advice": 1}
    assert [finding["rule"] for finding in document["findings"]] == [
        finding.rule for finding in VERDICT.findings
    ]
