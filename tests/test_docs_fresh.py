"""docs/reference/ holds what the rules declare and what was measured, byte for byte."""

from __future__ import annotations

from pathlib import Path

from tools.write_docs import reference_pages

_ROOT = Path(__file__).parents[1]
_PAGES = (
    "rules.md",
    "optimizers.md",
    "evidence.md",
    "versions.md",
    "predictions.md",
    "edits.md",
    "programs.md",
)
"""The schema of a plan has its own test, in tests/tools."""


def test_the_pages_of_the_reference_are_fresh() -> None:
    rendered = reference_pages(_ROOT)
    paths = [_ROOT / "docs" / "reference" / name for name in _PAGES]
    stale = [path.name for path in paths if path.read_text("utf-8") != rendered[path]]
    assert stale == [], "make docs renders them anew"
