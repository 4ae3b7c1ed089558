"""The harness's ladder of fixed figures as tables and bars of letters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ladders import not_counted, on_cpu, on_gpu
from measuring.ladder import Ladder
from measuring.ladder_table import ladder_table

_Golden = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("name", "ladder"), [("cpu", on_cpu()), ("gpu", on_gpu()), ("not-counted", not_counted())]
)
def test_table(golden: _Golden, name: str, ladder: Ladder) -> None:
    golden(ladder_table(ladder) + "\n", f"ladder/{name}.txt")
    assert max(map(len, ladder_table(ladder, width=80).splitlines())) <= 80
