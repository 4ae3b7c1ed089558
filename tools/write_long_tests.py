"""Writes tests/long_tests.json: the tests that `make test` leaves to `make test-long` for their time.

    PYTEST_ADDOPTS=--durations=0 make test >LOG; python -m tools.write_long_tests LOG

A test is long if its own call takes 0.6 s, and half a second in the median of its function's rows: the first
row that imports a library or launches ranks for all of them is not. Of a file the quickest test stays, if it
takes less than five seconds. All comparisons of trainings stay, and the launches that are not marked long.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tests" / "long_tests.json"
STAY = (
    "tests/semantics/",
    "tests/launching/test_end_to_end.py",
    "tests/launching/test_recover_runs.py",
)
"""What `make test` is for: trainings that must be those of the script, and real launches."""
_LONG_S, _MEDIAN_S, _QUICKEST_S = 0.6, 0.5, 5.0
_LINE = re.compile(r"(?P<seconds>[\d.]+)s call +(?P<test>tests/\S.*::.*\S)\s*$")


def long_tests(log: str) -> dict[str, float]:
    """Return the seconds of the long tests, by the id of each.

    Args:
        log: what pytest printed with --durations=0.
    """
    lines = map(_LINE.match, log.splitlines())
    seconds = {found["test"]: float(found["seconds"]) for found in lines if found is not None}
    of_function, of_file = defaultdict(list), defaultdict(list)
    for test, took in seconds.items():
        of_function[test.partition("[")[0]].append(took)
        of_file[test.partition("::")[0]].append((took, test))
    quickest = {test for took, test in map(min, of_file.values()) if took < _QUICKEST_S}
    return {
        test: took
        for test, took in sorted(seconds.items())
        if took >= _LONG_S
        and statistics.median(of_function[test.partition("[")[0]]) >= _MEDIAN_S
        and test not in quickest
        and not test.startswith(STAY)
    }


def main() -> None:
    """Read the log that the command line names, and write the file."""
    found = long_tests(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(found)} tests, {sum(found.values()):,.0f} s")


if __name__ == "__main__":
    main()
