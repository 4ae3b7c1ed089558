"""What an update of the live file costs: it comes several times in each step."""

from __future__ import annotations

import sys
from pathlib import Path

from zerofit.core.rank_observation import Phase, read_observation
from zerofit.training.reporting.observe import Observed

_MOST_PYTHON_CALLS = 4
"""To move(), and to what checks the descriptor and writes. A call with cold caches takes some 20 us (measured
between two products of matrices)."""


def test_an_update_on_a_cpu_rank_makes_few_calls(tmp_path: Path) -> None:
    rank = Observed(tmp_path, 0, on_cpu=True)
    rank.move(Phase.FORWARD)  # reads the memory, at most once a second
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        rank.move(Phase.BACKWARD)
    finally:
        sys.setprofile(None)
    assert calls[0] == "move"
    assert len(calls) <= _MOST_PYTHON_CALLS, calls
    found = read_observation(tmp_path, 0)
    assert found is not None
    assert found.phase is Phase.BACKWARD
