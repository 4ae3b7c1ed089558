"""`make test` runs a file's tests in one process, so that what they share is made once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # a suite of its own, whose order the suite that runs it shows
def test_the_tests_of_a_file_stay_in_one_process() -> None:
    pytest.importorskip("xdist")
    options = re.findall(r"^PARALLEL \?= (.*)$", (_ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    options[options.index("$(WORKERS)")] = "2"
    files = ("tests/core/test_units.py", "tests/core/test_rates.py", "tests/core/test_batch.py")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, *files]
    said = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout

    places = set(re.findall(r"^\[(gw\d)\] .* (tests/\w+/\w+\.py)::", said, re.MULTILINE))
    assert sorted(file for _, file in places) == sorted(files)
    assert {worker for worker, _ in places} == {"gw0", "gw1"}
