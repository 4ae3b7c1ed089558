"""A Verdict as a versioned JSON document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import Severity
from zerofit.configs.document import CutBlanks, RemoveKey, RenameKey, SetValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.engine import Finding, Verdict
    from zerofit.checking.targets import TargetFile
    from zerofit.configs.document import Edit
    from zerofit.core.setting import Place

FINDINGS_VERSION = 1
"""Raised whenever a field changes its meaning or is removed."""


def findings_json(verdict: Verdict, *, files: Sequence[TargetFile], num_rules: int) -> str:
    """Return the document: version, files, number of rules, counts, findings and unknown.

    Args:
        verdict: the rules' results.
        files: the files that were checked.
        num_rules: number of rules applied.
    """
    document = {
        "version": FINDINGS_VERSION,
        "files": [_file(file) for file in files],
        "num_rules": num_rules,
        "counts": {severity.value: len(verdict.of(severity)) for severity in Severity},
        "findings": [_finding(finding) for finding in verdict.findings],
        "unknown": [{"rule": unknown.rule, "fact": unknown.fact} for unknown in verdict.unknown],
        "not_checked": list(verdict.notes),
    }
    return json.dumps(document, indent=2)


def _file(file: TargetFile) -> dict[str, Any]:
    by = file.named_by
    return {
        "name": file.name,
        "kind": file.kind.value,
        "readable": file.broken is None,
        "named_by": {"text": by.text, **_place(by.place)} if by else None,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity.value,
        "confidence": finding.confidence.value,
        "summary": finding.summary,
        "found": finding.found,
        **_place(finding.place),
        "why": finding.why,
        "fix": finding.fix,
        "see": finding.see,
        "edits": [_edit(edit) for edit in finding.edits],
    }


def _place(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {"file": None, "line": None, "column": None}
    return {"file": place.file, "line": place.line, "column": place.column}


def _edit(edit: Edit) -> dict[str, Any]:
    where = {"file": edit.document, "path": list(edit.path)}
    match edit:
        case SetValue():
            return {"do": "set", **where, "value": edit.value}
        case RenameKey():
            return {"do": "rename", **where, "key": edit.key}
        case RemoveKey():
            return {"do": "remove", **where}
        case CutBlanks():
            return {"do": "cut blanks", **where, "line": edit.line}
