"""The pages as a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FIVE_MINUTES = 5 * 250
"""Words. ASSUMPTION: 250 a minute; code and the rendered reference are looked up, not read."""

_LARGEST_PAGE_BYTES = 1_200_000
"""What a browser shows within seconds on a slow machine. ASSUMPTION."""


def test_the_navigation_has_each_page() -> None:
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert {name.removesuffix(".md") for name in re.findall(r"[\w/-]+\.md", navigation)} == pages


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    home = (tmp_path / "index.html").read_text("utf-8")
    assert "Out of GPU memory?" in home
    assert (tmp_path / "search" / "search_index.json").is_file()
    sizes = {str(page.relative_to(tmp_path)): page.stat().st_size for page in tmp_path.rglob("*.html")}
    assert {name: size for name, size in sizes.items() if size > _LARGEST_PAGE_BYTES} == {}


def test_each_page_reads_in_five_minutes() -> None:
    texts = {
        path.name: re.sub(r"(?s)```.*?```", "", path.read_text("utf-8"))
        for path in (ROOT / "docs").glob("*.md")
    }
    assert {name: words for name, text in texts.items() if (words := len(text.split())) > _FIVE_MINUTES} == {}
