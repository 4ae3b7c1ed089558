"""Findings as text and as JSON, whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from verdicts import FILES, VERDICT

from zerofit.checking.engine import Verdict
from zerofit.checking.report import findings_text
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


def test_json_has_each_finding_in_the_order_of_the_text() -> None:
    document = json.loads(findings_json(VERDICT, files=FILES, num_rules=40))
    assert document["counts"] == {"error": 2, "warning": 2, "advice": 1}
    assert [finding["rule"] for finding in document["findings"]] == [
        finding.rule for finding in VERDICT.findings
    ]
