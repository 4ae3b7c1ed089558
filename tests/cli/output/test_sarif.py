"""SARIF: the log as a whole, and what the standard asks of its parts.

The log of the golden file was also held against the schema of SARIF 2.1.0, which no package brings along.
Source: https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from verdicts import DEEPSPEED_TEXT, FILES, VERDICT

from zerofit.checking.engine import Verdict
from zerofit.checking.rules import ALL_RULES
from zerofit.cli.output.sarif import sarif, uri
from zerofit.configs.document import RemoveKey

_RULES = ALL_RULES[:2]


def _log(verdict: Verdict = VERDICT, **changes: Any) -> dict[str, Any]:
    arguments = {"files": FILES, "rules": _RULES, "version": "0.1.0", **changes}
    log: dict[str, Any] = json.loads(sarif(verdict, **arguments))
    return log


def test_results_and_notifications(golden: Callable[[str, str], None]) -> None:
    run = _log()["runs"][0]
    golden(
        json.dumps({"results": run["results"], "invocations": run["invocations"]}, indent=2) + "\n",
        "findings/results.sarif.json",
    )


def test_the_frame() -> None:
    log = _log(Verdict())
    assert (log["version"], log["$schema"].rpartition("/")[2]) == ("2.1.0", "sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    assert run["results"] == []
    assert run["columnKind"] == "unicodeCodePoints"
    assert run["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("zerofit", "0.1.0")


def test_every_rule_has_its_page_and_a_level() -> None:
    rules = _log(rules=ALL_RULES)["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.id for rule in ALL_RULES]
    for rule in rules:
        assert rule["helpUri"].startswith("https://")
        assert rule["help"]["text"].startswith("fix: ")
        assert rule["help"]["markdown"].startswith(f"# {rule['id']}\n")
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")


def test_regions_and_references_hold() -> None:
    run = _log(rules=ALL_RULES)["runs"][0]
    for result in run["results"]:
        assert result["level"] in ("error", "warning", "note")
        for location in result["locations"]:
            region = location["physicalLocation"]["region"]
            assert region["startLine"] >= 1
            assert region.get("startColumn", 1) >= 1
        if "ruleIndex" in result:
            assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_what_stands_in_no_file_is_shown_at_the_first_one_and_nowhere_without_files() -> None:
    first = VERDICT.findings[:1]
    (result,) = _log(Verdict(findings=first))["runs"][0]["results"]
    location = {"artifactLocation": {"uri": "acc.yaml"}, "region": {"startLine": 1}}
    assert result["locations"] == [{"physicalLocation": location}]
    (result,) = _log(Verdict(findings=first), files=())["runs"][0]["results"]
    assert "locations" not in result


def _replaced(text: str, replacement: dict[str, Any]) -> str:
    lines = text.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column - 1

    region = replacement["deletedRegion"]
    start = offset(region["startLine"], region["startColumn"])
    end = offset(region["endLine"], region["endColumn"])
    return text[:start] + replacement["insertedContent"]["text"] + text[end:]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, DEEPSPEED_TEXT.replace("optimisation", "optimization")),
        (2, DEEPSPEED_TEXT.replace('  "amp": {},\n', "").replace("false", "true")),
    ],
)
def test_a_fix_makes_the_mended_text(number: int, expected: str) -> None:
    result = _log()["runs"][0]["results"][number]
    (change,) = result["fixes"][0]["artifactChanges"]
    assert change["artifactLocation"]["uri"] == "conf/my%20ds.json"
    (replacement,) = change["replacements"]
    assert _replaced(DEEPSPEED_TEXT, replacement) == expected


def test_an_edit_without_a_place_is_no_fix() -> None:
    finding = VERDICT.findings[1]
    for edit in (RemoveKey(document="-", path=("a",)), RemoveKey(document="acc.yaml", path=("a",))):
        verdict = Verdict(findings=(type(finding)(**{**_fields(finding), "edits": (edit,)}),))
        assert "fixes" not in _log(verdict)["runs"][0]["results"][0]


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ds.json", "ds.json"),
        ("./conf/ds.json", "conf/ds.json"),
        ("/abs/ds.json", "file:///abs/ds.json"),
        ("my ds%.json", "my%20ds%25.json"),
        ("größe.json", "gr%C3%B6%C3%9Fe.json"),
    ],
)
def test_uri(name: str, expected: str) -> None:
    assert uri(name) == expected
