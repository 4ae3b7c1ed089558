"""Which tests make test leaves to make test-long, from what pytest says that they took."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tools.write_long_tests import FILE, STAY, long_tests

_ROOT = Path(__file__).parents[2]
_LOG = """
9.00s setup    tests/a/test_one.py::test_alone
1.20s call     tests/a/test_one.py::test_alone
0.70s call     tests/a/test_one.py::test_quickest
4.00s call     tests/a/test_one.py::test_rows[the first imports a library, say]
0.10s call     tests/a/test_one.py::test_rows[1-a b]
0.10s call     tests/a/test_one.py::test_rows[2]
0.90s call     tests/b/test_two.py::test_rows[x]
0.80s call     tests/b/test_two.py::test_rows[y]
6.00s call     tests/c/test_minutes.py::test_alone
7.00s call     tests/semantics/test_semantics.py::test_it[z2]
(3 durations < 0.005s hidden.  Use -vv to show these durations.)
"""


def test_a_test_is_long_by_its_own_time_and_the_quickest_of_a_file_stays() -> None:
    assert long_tests(_LOG) == {
        "tests/a/test_one.py::test_alone": 1.2,
        "tests/a/test_one.py::test_quickest": 0.7,
        "tests/b/test_two.py::test_rows[x]": 0.9,
        "tests/c/test_minutes.py::test_alone": 6.0,
    }


def test_each_test_of_the_list_is_there_and_none_that_has_to_stay() -> None:
    tests = json.loads(FILE.read_text(encoding="utf-8"))
    assert not [test for test in tests if test.startswith(STAY)]
    gone = []
    for test in tests:
        file, _, name = test.partition("[")[0].partition("::")
        path = _ROOT / file
        if not path.exists() or not re.search(rf"def {name.rpartition('::')[2]}\b", path.read_text()):
            gone.append(test)
    assert not gone, "python -m tools.write_long_tests"
