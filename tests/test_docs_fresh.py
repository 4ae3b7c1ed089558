"""docs/reference/ holds what the rules declare and what was measured, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.write_docs import reference_pages

_ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "name", ["rules.md", "optimizers.md", "evidence.md", "versions.md", "predictions.md"]
)
def test_a_page_of_the_reference_is_fresh(name: str) -> None:
    path = _ROOT / "docs" / "reference" / name
    assert path.read_text("utf-8") == reference_pages(_ROOT)[path], "make docs renders it anew"
