"""A Verdict as SARIF 2.1.0, which code review tools show beside the lines.

Format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from zerofit.checking.report import unknown_lines
from zerofit.checking.rule import Severity
from zerofit.checking.rule_pages import fix_text, rule_page
from zerofit.checking.targets import DICTIONARY
from zerofit.configs.text.edits import Uneditable, apply_edits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.engine import Finding, Verdict
    from zerofit.checking.rule import Rule
    from zerofit.checking.targets import TargetFile
    from zerofit.configs.document import Document, Edit

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.ADVICE: "note"}


def sarif(
    verdict: Verdict,
    *,
    files: Sequence[TargetFile],
    rules: Sequence[Rule],
    version: str,
) -> str:
    """Return the log as JSON text.

    Args:
        verdict: the rules' results.
        files: the files that were checked; a finding on a flag is shown at the first of them.
        rules: the rules applied.
        version: zerofit's own.
    """
    documents = {
        file.name: file.document
        for file in files
        if file.document is not None and not file.name.startswith(DICTIONARY)
    }
    indices = {rule.id: number for number, rule in enumerate(rules)}
    results = []
    for finding in verdict.findings:
        result = _result(finding, fallback=files[0].name if files else None)
        if finding.rule in indices:
            result["ruleIndex"] = indices[finding.rule]
        if fixes := _fixes(finding, documents):
            result["fixes"] = fixes
        results.append(result)
    run = {
        "tool": {
            "driver": {
                "name": "zerofit",
                "version": version,
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {"level": "note", "message": {"text": line}} for line in unknown_lines(verdict)
                ],
            }
        ],
        "results": results,
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": f"{rule.summary}: {rule.why}"},
        "help": {"text": f"fix: {fix_text(rule)}", "markdown": rule_page(rule)},
        "helpUri": rule.see,
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(finding: Finding, *, fallback: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": _LEVELS[finding.severity],
        "message": {
            "text": f"{finding.summary}. Found: {finding.found}. Why: {finding.why}. Fix: {finding.fix}."
        },
        "properties": {"confidence": finding.confidence.value},
    }
    place = finding.place
    name = place.file if place else fallback
    if name is not None:
        region = {"startLine": place.line if place else 1}
        if place and not name.startswith(DICTIONARY):  # which has only the lines of the script
            region["startColumn"] = place.column
        location = {"artifactLocation": {"uri": uri(name.removeprefix(DICTIONARY))}, "region": region}
        result["locations"] = [{"physicalLocation": location}]
    return result


def uri(name: str) -> str:
    """Return a file name as URI reference: a relative one unchanged, an absolute one with its scheme."""
    quoted = "".join(
        letter if re.match(r"[A-Za-z0-9_.~/-]", letter) else "".join(f"%{byte:02X}" for byte in code)
        for letter in name.removeprefix("./")
        for code in (letter.encode("utf-8", "surrogateescape"),)
    )
    return f"file://{quoted}" if name.startswith("/") else quoted


def _fixes(finding: Finding, documents: dict[str, Document]) -> list[dict[str, Any]]:
    edits: dict[str, list[Edit]] = defaultdict(list)
    for edit in finding.edits:
        edits[edit.document].append(edit)
    changes = []
    for name, its_edits in edits.items():
        try:
            after = apply_edits(documents[name], its_edits)
        except (KeyError, Uneditable):  # it is in no file, or can't be changed safely
            return []
        replacement = _replacement(documents[name].text, after)
        changes.append({"artifactLocation": {"uri": uri(name)}, "replacements": [replacement]})
    return [{"description": {"text": finding.fix}, "artifactChanges": changes}] if changes else []


def _replacement(before: str, after: str) -> dict[str, Any]:
    """Return the one replacement that turns a text into another, between common prefix and suffix."""
    shorter = min(len(before), len(after))
    start = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    tail = next((i for i in range(shorter - start) if before[-1 - i] != after[-1 - i]), shorter - start)
    deleted = {
        **_position(before, start, "start"),
        **_position(before, len(before) - tail, "end"),
    }
    return {"deletedRegion": deleted, "insertedContent": {"text": after[start : len(after) - tail]}}


def _position(text: str, offset: int, which: str) -> dict[str, int]:
    line_start = text.rfind("\n", 0, offset) + 1
    return {
        f"{which}Line": text.count("\n", 0, offset) + 1,
        f"{which}Column": offset - line_start + 1,
    }
